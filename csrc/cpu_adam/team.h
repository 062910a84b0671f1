// A team of threads for one kernel: its size is its own, whatever OMP_NUM_THREADS says.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_adam {

// Runs chunks of work on `num_threads` threads, of which the caller is one. Any thread may call; calls take turns.
// All chunks run with the default floating-point environment: round to nearest, subnormals kept.
class Team {
public:
    // In a child made by fork() the threads do not exist: work runs on the caller alone, and the team is never destroyed,
    // because destroying a condition waits for its waiters.
    struct Ender {
        void operator()(Team* team) const;
    };
    static std::unique_ptr<Team, Ender> start(std::size_t num_threads);
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::size_t num_threads() const { return workers_.size() + 1; }
    // Calls chunk(0) ... chunk(num_chunks - 1), each once, in any order, and returns when all have returned.
    void run(std::size_t num_chunks, const std::function<void(std::size_t)>& chunk);

private:
    explicit Team(std::size_t num_threads);
    ~Team();
    void work();
    void take_chunks(std::unique_lock<std::mutex>& lock);
    bool owns_threads() const;

    const long owner_process_;
    std::mutex turn_;  // held by the one caller that is served
    std::mutex mutex_;  // guards all below
    std::condition_variable started_, finished_;
    const std::function<void(std::size_t)>* chunk_ = nullptr;
    std::size_t num_chunks_ = 0, next_chunk_ = 0, num_done_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace cpu_adam
