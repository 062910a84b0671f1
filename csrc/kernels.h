// Which of a module's kernels, one an instruction set, this CPU can run. A Kernel has `name` and `supported`.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace kernels {

// `all` is the fastest first, and so is what is returned.
template <class Kernel>
std::vector<const Kernel*> supported(const std::vector<const Kernel*>& all) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    std::vector<const Kernel*> found;
    for (const Kernel* kernel : all) {
        if (kernel->supported()) found.push_back(kernel);
    }
    return found;
}

template <class Kernel>
std::vector<std::string> names(const std::vector<const Kernel*>& all) {
    std::vector<std::string> found;
    for (const Kernel* kernel : supported(all)) found.emplace_back(kernel->name);
    return found;
}

template <class Kernel>
const Kernel& named(const std::vector<const Kernel*>& all, const std::string& name) {
    for (const Kernel* kernel : supported(all)) {
        if (name == kernel->name) return *kernel;
    }
    throw pybind11::value_error("no kernel named " + name);
}

}  // namespace kernels
