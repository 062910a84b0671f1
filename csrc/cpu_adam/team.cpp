// The thread team: workers sleep until there are chunks, and take them one at a time.
#include "team.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpu_adam {

namespace {

// The results must not depend on what the calling thread has set, for example torch.set_flush_denormal.
class DefaultFloatingPoint {
#if defined(__x86_64__)
public:
    DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

private:
    const unsigned saved_;
#endif
};

}  // namespace

Team::Team(std::size_t num_threads) : owner_process_(getpid()) {
    for (std::size_t i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

void Team::Ender::operator()(Team* team) const {
    if (team->owns_threads()) delete team;
}

std::unique_ptr<Team, Team::Ender> Team::start(std::size_t num_threads) {
    return std::unique_ptr<Team, Ender>(new Team(num_threads));
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    started_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Team::run(std::size_t num_chunks, const std::function<void(std::size_t)>& chunk) {
    const DefaultFloatingPoint floating_point;
    if (num_chunks < 2 || workers_.empty() || !owns_threads()) {
        for (std::size_t i = 0; i < num_chunks; ++i) chunk(i);
        return;
    }
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    chunk_ = &chunk;
    num_chunks_ = num_chunks;
    next_chunk_ = num_done_ = 0;
    started_.notify_all();
    take_chunks(lock);
    // Only for chunks, not for workers: one that a busy machine has not woken yet holds nobody up.
    finished_.wait(lock, [this] { return num_done_ == num_chunks_; });
}

void Team::work() {
    const DefaultFloatingPoint floating_point;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        started_.wait(lock, [this] { return stopping_ || next_chunk_ < num_chunks_; });
        if (stopping_) return;
        take_chunks(lock);
    }
}

void Team::take_chunks(std::unique_lock<std::mutex>& lock) {
    while (next_chunk_ < num_chunks_) {
        const std::size_t mine = next_chunk_++;
        const auto& chunk = *chunk_;  // stays alive until all chunks are done
        lock.unlock();
        chunk(mine);
        lock.lock();
        if (++num_done_ == num_chunks_) finished_.notify_one();
    }
}

bool Team::owns_threads() const { return getpid() == owner_process_; }

}  // namespace cpu_adam
