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

int current_core() { return sched_getcpu(); }

void bind(std::thread& thread, int core) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(core, &mask);
    pthread_setaffinity_np(thread.native_handle(), sizeof mask, &mask);
}

#else

std::vector<int> cores_of(CoreShare) { return {}; }
int current_core() { return -1; }
void bind(std::thread&, int) {}

#endif

}  // namespace cpu_adam
