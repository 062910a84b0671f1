// The thread team: workers sleep until there is a job, enter it if it still has chunks, and take them one at a time.
#include "team.h"

#include <unistd.h>

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpu_adam {

#if defined(__x86_64__)
Team::DefaultFloatingPoint::DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
Team::DefaultFloatingPoint::~DefaultFloatingPoint() { _mm_setcsr(saved_); }
#else
Team::DefaultFloatingPoint::DefaultFloatingPoint() : saved_(0) {}
Team::DefaultFloatingPoint::~DefaultFloatingPoint() = default;
#endif

bool Team::Job::has_chunks() const { return next.load(std::memory_order_relaxed) < num_chunks; }

void Team::Job::take_chunks() {
    for (std::size_t mine; (mine = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) function(context, mine);
}

Team::Team(std::size_t num_threads, CoreShare share) : owner_process_(getpid()), share_(share) {
    for (std::size_t i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i - 1); });
}

std::unique_ptr<Team, Team::Ender> Team::start(std::size_t num_threads, CoreShare share) {
    return std::unique_ptr<Team, Ender>(new Team(num_threads, share));
}

void Team::Ender::operator()(Team* team) const {
    if (team->owns_threads()) delete team;
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    started_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Team::share_out(Job& job) {
    const std::lock_guard<std::mutex> turn(turn_);
    const std::size_t num_placed = place_workers();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        num_awake_ = std::min(num_placed, job.num_chunks - 1);
    }
    started_.notify_all();
    job.take_chunks();
    std::unique_lock<std::mutex> lock(mutex_);
    // Nobody may enter any more, and only those inside are waited for: a worker that a busy machine has not woken yet holds
    // nobody up.
    job_ = nullptr;
    finished_.wait(lock, [this] { return num_inside_ == 0; });
}

// Returns how many workers have a core, beside the one that the caller needs.
std::size_t Team::place_workers() {
    const std::vector<int> cores = cores_of(share_);
    if (cores.empty()) return workers_.size();
    if (cores != cores_) {
        for (auto& worker : workers_) bind(worker, cores);
        cores_ = cores;
    }
    return std::min(workers_.size(), cores.size() - 1);
}

void Team::work(std::size_t index) {
    const DefaultFloatingPoint floating_point;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        started_.wait(lock, [this, index] {
            return stopping_ || (job_ != nullptr && index < num_awake_ && job_->has_chunks());
        });
        if (stopping_) return;
        Job& job = *job_;
        ++num_inside_;
        lock.unlock();
        job.take_chunks();
        lock.lock();
        if (--num_inside_ == 0) finished_.notify_one();
    }
}

bool Team::owns_threads() const { return getpid() == owner_process_; }

}  // namespace cpu_adam
