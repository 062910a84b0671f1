// Affinity masks of Linux.
#include "cores.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace cpu_adam {

#if defined(__linux__)

namespace {

// The mask of the main thread is the process's: it is the one that taskset changes, and no other thread's concern.
std::vector<int> allowed_cores() {
    std::vector<int> cores;
    cpu_set_t mask;
    if (sched_getaffinity(getpid(), sizeof mask, &mask) != 0) return cores;  // a machine with more cores than a mask holds
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &mask)) cores.push_back(core);
    }
    return cores;
}

}  // namespace

std::vector<int> cores_of(CoreShare share) {
    const std::vector<int> all = allowed_cores();
    if (all.empty()) return all;
    const std::size_t size = all.size() > share.count ? all.size() / share.count : 1;
    const std::size_t begin = share.index * size % (all.size() / size * size);
    return {all.begin() + begin, all.begin() + begin + size};
}

void bind(std::thread& thread, const std::vector<int>& cores) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int core : cores) CPU_SET(core, &mask);
    pthread_setaffinity_np(thread.native_handle(), sizeof mask, &mask);
}

#else

std::vector<int> cores_of(CoreShare) { return {}; }
void bind(std::thread&, const std::vector<int>&) {}

#endif

}  // namespace cpu_adam
