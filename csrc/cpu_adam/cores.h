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

// Lets `thread` run on `cores` only. A refusal is ignored: the thread then runs where it is allowed to.
void bind(std::thread& thread, const std::vector<int>& cores);

}  // namespace cpu_adam
