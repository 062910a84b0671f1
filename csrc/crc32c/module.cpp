// The Python module infinity._crc32c: CRC32C of bytes by address, without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "../kernels.h"
#include "kernel.h"

namespace py = pybind11;

namespace crc32c {

namespace {

// The fastest first.
std::vector<const Kernel*> all_kernels() {
#if defined(__x86_64__)
    return {&kAvx512, &kSse42, &kPortable};
#elif defined(__aarch64__) && defined(__linux__)
    return {&kArm, &kPortable};
#else
    return {&kPortable};
#endif
}

std::vector<std::string> names() { return kernels::names(all_kernels()); }

class Crc32c {
public:
    explicit Crc32c(const std::string& name) : kernel_(kernels::named(all_kernels(), name)) {}

    std::string name() const { return kernel_.name; }
    std::uint32_t extend(std::uint32_t crc, std::uintptr_t address, std::size_t size) const {
        return ~kernel_.extend(~crc, reinterpret_cast<const unsigned char*>(address), size);
    }

private:
    const Kernel& kernel_;
};

}  // namespace

}  // namespace crc32c

PYBIND11_MODULE(_crc32c, module) {
    using namespace crc32c;
    module.doc() = "CRC32C of host memory, by address.";
    module.def("names", names, "The kernels that this CPU can run, the fastest first.");
    py::class_<Crc32c>(module, "Crc32c")
        .def(py::init<const std::string&>(), py::arg("name"))
        .def_property_readonly("name", &Crc32c::name)
        .def("extend", &Crc32c::extend, py::call_guard<py::gil_scoped_release>(), py::arg("crc"), py::arg("address"),
             py::arg("size"), "The CRC32C of the bytes before, whose own is `crc` (0: there are none), and these.");
}
