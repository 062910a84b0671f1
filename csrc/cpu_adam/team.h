// A team of threads for one kernel: its size is its own, whatever OMP_NUM_THREADS says.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cores.h"

namespace cpu_adam {

// Runs chunks of work on `num_threads` threads, of which the caller is one. Any thread may call; calls take turns.
// All chunks run with the default floating-point environment: round to nearest, subnormals kept.
//
// The workers are bound to the cores of the process's share, all of them to all of these: bound to one each they would wait
// where other threads are busy, while another core is free. The mask of the process is read before every run: where it has
// become smaller, the workers that have no core left stay asleep. The caller may go where it likes.
class Team {
public:
    // In a child made by fork() the threads do not exist: work runs on the caller alone, and the team is never destroyed,
    // because destroying a condition waits for its waiters.
    struct Ender {
        void operator()(Team* team) const;
    };
    static std::unique_ptr<Team, Ender> start(std::size_t num_threads, CoreShare share);
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::size_t num_threads() const { return workers_.size() + 1; }

    // Calls work(0) ... work(num_chunks - 1), each once, in any order, and returns when all have returned.
    template <class Work>
    void run(std::size_t num_chunks, const Work& work) {
        const DefaultFloatingPoint floating_point;
        const auto call = [](const void* context, std::size_t chunk) { (*static_cast<const Work*>(context))(chunk); };
        Job job{call, &work, num_chunks};
        if (num_chunks < 2 || workers_.empty() || !owns_threads()) {
            job.take_chunks();
        } else {
            share_out(job);
        }
    }

private:
    // Results must not depend on what the thread has set, for example torch.set_flush_denormal.
    class DefaultFloatingPoint {
    public:
        DefaultFloatingPoint();
        ~DefaultFloatingPoint();

    private:
        const unsigned saved_;
    };

    // The caller's, on its stack. Whoever is inside takes one chunk after the other until there are none.
    struct Job {
        bool has_chunks() const;
        void take_chunks();

        void (*const function)(const void* context, std::size_t chunk);
        const void* const context;
        const std::size_t num_chunks;
        std::atomic<std::size_t> next{0};
    };

    Team(std::size_t num_threads, CoreShare share);
    ~Team();
    void share_out(Job& job);
    std::size_t place_workers();
    void work(std::size_t index);
    bool owns_threads() const;

    const long owner_process_;
    const CoreShare share_;
    std::mutex turn_;           // held by the one caller that is served
    std::vector<int> cores_;    // of the share, as they were last seen; guarded by turn_
    std::mutex mutex_;          // guards all below
    std::condition_variable started_, finished_;
    Job* job_ = nullptr;  // that workers may enter
    std::size_t num_awake_ = 0, num_inside_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace cpu_adam
