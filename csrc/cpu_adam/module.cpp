// The Python module infinity._cpu_adam: picks a kernel, divides the work among a team, releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "team.h"

namespace py = pybind11;

namespace cpu_adam {

namespace {

// About 1 MB of traffic: small enough to even out a busy core, large enough that taking one costs nothing beside it.
constexpr std::size_t kChunkElements = 32768;
constexpr std::size_t kChunkBlocks = kChunkElements / kBlockElements;

std::vector<const Kernel*> supported_kernels() {
    std::vector<const Kernel*> kernels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    for (const Kernel* kernel : {&kAvx512, &kAvx2}) {
        if (kernel->supported()) kernels.push_back(kernel);
    }
#endif
    kernels.push_back(&kScalar);
    return kernels;
}

std::vector<std::string> names() {
    std::vector<std::string> found;
    for (const Kernel* kernel : supported_kernels()) found.emplace_back(kernel->name);
    return found;
}

const Kernel& kernel_named(const std::string& name) {
    for (const Kernel* kernel : supported_kernels()) {
        if (name == kernel->name) return *kernel;
    }
    throw py::value_error("no kernel named " + name);
}

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

std::size_t num_pieces(std::size_t whole, std::size_t piece) { return (whole + piece - 1) / piece; }

// The lanes of one block, folded in halves: a fixed tree.
double fold(double* lanes) {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

class CpuAdam {
public:
    CpuAdam(const std::string& name, std::size_t num_threads) : kernel_(kernel_named(name)), team_(Team::start(num_threads)) {}

    void update(MasterFormat master, GradFormat grad_format, std::size_t num_elements, std::uintptr_t weights,
                std::uintptr_t low, std::uintptr_t out, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
                std::uintptr_t grad, const Scalars& scalars) {
        const Arrays arrays = {at<void>(weights),  at<std::int16_t>(low), at<std::uint16_t>(out),
                               at<float>(exp_avg), at<float>(exp_avg_sq), at<const void>(grad)};
        const UpdateFunction function = kernel_.update(master, grad_format);
        team_->run(num_pieces(num_elements, kChunkElements), [&](std::size_t chunk) {
            const std::size_t begin = chunk * kChunkElements;
            function(arrays, scalars, begin, std::min(begin + kChunkElements, num_elements));
        });
    }

    bool sums_of_squares(GradFormat grad_format, std::size_t num_elements, std::uintptr_t grad, std::uintptr_t sums) {
        const SquaresFunction function = kernel_.squares(grad_format);
        const std::size_t num_blocks = num_pieces(num_elements, kBlockElements);
        double* const partials = at<double>(sums);
        team_->run(num_pieces(num_blocks, kChunkBlocks), [&](std::size_t chunk) {
            const std::size_t last = std::min((chunk + 1) * kChunkBlocks, num_blocks);
            for (std::size_t block = chunk * kChunkBlocks; block < last; ++block) {
                double lanes[kLanes];
                const std::size_t begin = block * kBlockElements;
                function(at<const void>(grad), begin, std::min(begin + kBlockElements, num_elements), lanes);
                partials[block] = fold(lanes);
            }
        });
        // 4,096 squares of finite fp32 cannot overflow fp64: a sum is finite where all its elements are.
        return std::all_of(partials, partials + num_blocks, [](double sum) { return std::isfinite(sum); });
    }

    std::string name() const { return kernel_.name; }
    std::size_t num_threads() const { return team_->num_threads(); }

private:
    const Kernel& kernel_;
    std::unique_ptr<Team, Team::Ender> team_;
};

Scalars scalars(double coefficient, double decay, double l2, double beta2, double lerp_weight, double square_weight,
                double root_correction, double eps, double step_size) {
    const auto once = [](double value) { return static_cast<float>(value); };
    return {once(coefficient),   once(decay),           once(l2),  once(beta2),    once(lerp_weight),
            once(square_weight), once(root_correction), once(eps), once(step_size)};
}

}  // namespace

}  // namespace cpu_adam

PYBIND11_MODULE(_cpu_adam, module) {
    using namespace cpu_adam;
    module.doc() = "Fused Adam on host memory, by address.";
    module.attr("BLOCK_ELEMENTS") = kBlockElements;
    module.def("names", names, "The kernels that this CPU can run, the fastest first.");
    py::enum_<GradFormat>(module, "GradFormat")
        .value("fp32", GradFormat::fp32)
        .value("bf16", GradFormat::bf16)
        .value("fp16", GradFormat::fp16);
    py::enum_<MasterFormat>(module, "MasterFormat")
        .value("fp32", MasterFormat::fp32)
        .value("split_bf16", MasterFormat::split_bf16)
        .value("fp32_out_bf16", MasterFormat::fp32_out_bf16)
        .value("fp32_out_fp16", MasterFormat::fp32_out_fp16);
    py::class_<Scalars>(module, "Scalars")
        .def(py::init(&scalars), py::kw_only(), py::arg("coefficient"), py::arg("decay"), py::arg("l2"), py::arg("beta2"),
             py::arg("lerp_weight"), py::arg("square_weight"), py::arg("root_correction"), py::arg("eps"),
             py::arg("step_size"));
    py::class_<CpuAdam>(module, "CpuAdam")
        .def(py::init<const std::string&, std::size_t>(), py::arg("name"), py::arg("num_threads"))
        .def_property_readonly("name", &CpuAdam::name)
        .def_property_readonly("num_threads", &CpuAdam::num_threads)
        .def("update", &CpuAdam::update, py::call_guard<py::gil_scoped_release>(), py::arg("master"), py::arg("grad_format"),
             py::arg("num_elements"), py::kw_only(), py::arg("weights"), py::arg("low"), py::arg("out"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("grad"), py::arg("scalars"))
        .def("sums_of_squares", &CpuAdam::sums_of_squares, py::call_guard<py::gil_scoped_release>(), py::arg("grad_format"),
             py::arg("num_elements"), py::kw_only(), py::arg("grad"), py::arg("sums"));
}
