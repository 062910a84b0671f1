// Which cores this process may use, and threads bound to them. Where the system has no such thing: none, and no binding.
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace cpu_adam {

// A process's part of the cores that it shares with other processes on this machine: part `index` of `count` equal ones.
struct CoreShare {
    std::size_t index, count;
};

// The cores of the share, as the process's affinity mask is now, in ascending order. Every share has a core at least.
std::vector<int> cores_of(CoreShare share);

// The core that the calling thread is on at the moment; -1 where that is not known.
int current_core();

// Lets `thread` run on `core` only. A refusal is ignored: the thread then runs where it is allowed to.
void bind(std::thread& thread, int core);

}  // namespace cpu_adam
