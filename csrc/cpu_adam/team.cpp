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

Team::~Team() {
    if (!owns_threads()) {
        for (auto& worker : workers_) worker.detach();
        return;
    }
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
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        chunk_ = &chunk;
        num_chunks_ = num_chunks;
        next_chunk_ = 0;
        num_busy_ = workers_.size();
        ++round_;
    }
    started_.notify_all();
    take_chunks(num_chunks, chunk);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return num_busy_ == 0; });
}

void Team::work() {
    const DefaultFloatingPoint floating_point;
    std::size_t seen_round = 0;
    while (true) {
        std::size_t num_chunks;
        const std::function<void(std::size_t)>* chunk;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            started_.wait(lock, [&] { return stopping_ || round_ != seen_round; });
            if (stopping_) return;
            seen_round = round_;
            num_chunks = num_chunks_;
            chunk = chunk_;
        }
        take_chunks(num_chunks, *chunk);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--num_busy_ == 0) finished_.notify_one();
    }
}

void Team::take_chunks(std::size_t num_chunks, const std::function<void(std::size_t)>& chunk) {
    while (true) {
        std::size_t mine;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (next_chunk_ == num_chunks) return;
            mine = next_chunk_++;
        }
        chunk(mine);
    }
}

// In a child made by fork() the threads do not exist: work runs on the caller alone.
bool Team::owns_threads() const { return getpid() == owner_process_; }

}  // namespace cpu_adam
