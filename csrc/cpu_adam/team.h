// A team of threads for one kernel: its size is its own, whatever OMP_NUM_THREADS says.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cpu_adam {

// Runs chunks of work on `num_threads` threads, of which the caller is one. Any thread may call; calls take turns.
// All chunks run with the default floating-point environment: round to nearest, subnormals kept.
class Team {
public:
    explicit Team(std::size_t num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::size_t num_threads() const { return workers_.size() + 1; }
    // Calls chunk(0) ... chunk(num_chunks - 1), each once, in any order, and returns when all have returned.
    void run(std::size_t num_chunks, const std::function<void(std::size_t)>& chunk);

private:
    void work();
    void take_chunks(std::size_t num_chunks, const std::function<void(std::size_t)>& chunk);
    bool owns_threads() const;

    const long owner_process_;
    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable started_, finished_;
    const std::function<void(std::size_t)>* chunk_ = nullptr;
    std::size_t num_chunks_ = 0, next_chunk_ = 0, num_busy_ = 0, round_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace cpu_adam
