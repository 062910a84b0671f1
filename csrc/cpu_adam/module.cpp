// The Python module infinity._cpu_adam: picks a kernel, divides the work among a team, releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels.h"
#include "kernel.h"
#include "team.h"

namespace py = pybind11;

namespace cpu_adam {

namespace {

// Pieces of work: large enough that taking one costs nothing beside it (the most is 7 MB of traffic), small enough that one
// tile has several for each thread of a large team.
constexpr std::size_t kMostElements = 262144;
constexpr std::size_t kFewestElements = kBlockElements;
constexpr std::size_t kChunksPerThread = 8;

std::size_t num_pieces(std::size_t whole, std::size_t piece) { return (whole + piece - 1) / piece; }

// Whole blocks, so that arrays which start at a cache line are cut at cache lines.
std::size_t chunk_elements(std::size_t num_elements, std::size_t num_threads) {
    const std::size_t even = num_pieces(num_elements, num_threads * kChunksPerThread);
    return num_pieces(std::clamp(even, kFewestElements, kMostElements), kBlockElements) * kBlockElements;
}

// The fastest first.
std::vector<const Kernel*> all_kernels() {
#if defined(__x86_64__)
    return {&kAvx512, &kAvx2, &kScalar};
#else
    return {&kScalar};
#endif
}

std::vector<std::string> names() { return kernels::names(all_kernels()); }

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The lanes of one block, folded in halves: a fixed tree.
double fold(double* lanes) {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

// A run of a gradient that arrives: `length` elements at `source`, of which the first becomes element `start`.
struct Run {
    std::size_t start, length;
    std::uintptr_t source;
    GradFormat format;

    std::size_t end() const { return start + length; }
};

std::size_t element_bytes(GradFormat format) { return format == GradFormat::fp32 ? 4 : 2; }

class CpuAdam {
public:
    CpuAdam(const std::string& name, std::size_t num_threads, std::size_t share_index, std::size_t num_shares)
        : kernel_(kernels::named(all_kernels(), name)), team_(Team::start(num_threads, {share_index, num_shares})) {}

    void update(MasterFormat master, GradFormat grad_format, std::size_t num_elements, const Arrays& arrays,
                const AdamScalars& scalars) {
        const auto function = kernel_.adam(master, grad_format);
        for_chunks(num_elements, [&](std::size_t begin, std::size_t end) { function(arrays, scalars, begin, end); });
    }

    void traffic(MasterFormat master, GradFormat grad_format, std::size_t num_elements, const Arrays& arrays,
                 std::uint32_t mask) {
        const auto function = kernel_.adam_traffic(master, grad_format);
        for_chunks(num_elements, [&](std::size_t begin, std::size_t end) { function(arrays, mask, begin, end); });
    }

    bool sums_of_squares(GradFormat grad_format, std::size_t num_elements, std::uintptr_t grad, std::uintptr_t sums) {
        const SquaresFunction function = kernel_.squares(grad_format);
        double* const partials = at<double>(sums);
        for_chunks(num_elements, [&](std::size_t begin, std::size_t end) {
            for_blocks(begin, end, [&](std::size_t block, std::size_t block_end) {
                double lanes[kLanes] = {};
                function(at<const void>(grad), block, block_end, lanes);
                partials[block / kBlockElements] = fold(lanes);
            });
        });
        return all_finite(partials, num_elements);
    }

    // Runs ascend and do not overlap; elements of no run become zero.
    bool arrive(const std::vector<Run>& runs, GradFormat grad_format, std::size_t num_elements, std::uintptr_t grad,
                std::uintptr_t sums) {
        double* const partials = at<double>(sums);
        const std::size_t grad_bytes = element_bytes(grad_format);
        const auto arrive_at = [&](std::size_t begin, std::size_t end) {
            auto run = std::partition_point(runs.begin(), runs.end(), [&](const Run& run) { return run.end() <= begin; });
            for_blocks(begin, end, [&](std::size_t block, std::size_t block_end) {
                double lanes[kLanes] = {};
                for (std::size_t next = block; next < block_end;) {
                    const std::size_t start = run == runs.end() ? block_end : std::clamp(run->start, next, block_end);
                    std::memset(at<char>(grad) + next * grad_bytes, 0, (start - next) * grad_bytes);
                    if (start == block_end) break;
                    next = std::min(run->end(), block_end);
                    const std::uintptr_t source = run->source + (start - run->start) * element_bytes(run->format);
                    kernel_.arrival(run->format, grad_format)(at<const void>(source), at<void>(grad), start, next, lanes);
                    if (next == run->end()) ++run;
                }
                partials[block / kBlockElements] = fold(lanes);
            });
        };
        // Into the front of the array that it comes from: in ascending order nothing is overwritten before it is read.
        const std::uintptr_t grad_end = grad + num_elements * grad_bytes;
        const bool one_after_the_other = std::any_of(runs.begin(), runs.end(), [&](const Run& run) {
            const bool overlaps = run.source < grad_end && grad < run.source + run.length * element_bytes(run.format);
            const bool stays = run.format == grad_format && run.source == grad + run.start * grad_bytes;
            return overlaps && !stays;
        });
        if (one_after_the_other) {
            team_->run(1, [&](std::size_t) { arrive_at(0, num_elements); });
        } else {
            for_chunks(num_elements, arrive_at);
        }
        return all_finite(partials, num_elements);
    }

    std::string name() const { return kernel_.name; }
    std::size_t num_threads() const { return team_->num_threads(); }

private:
    template <class Work>
    void for_chunks(std::size_t num_elements, const Work& work) {
        const std::size_t size = chunk_elements(num_elements, num_threads());
        team_->run(num_pieces(num_elements, size), [&](std::size_t chunk) {
            work(chunk * size, std::min((chunk + 1) * size, num_elements));
        });
    }

    template <class Work>
    static void for_blocks(std::size_t begin, std::size_t end, const Work& work) {
        for (; begin < end; begin += kBlockElements) work(begin, std::min(begin + kBlockElements, end));
    }

    // 4,096 squares of finite fp32 cannot overflow fp64: a sum is finite where all its elements are.
    static bool all_finite(const double* partials, std::size_t num_elements) {
        const double* const end = partials + num_pieces(num_elements, kBlockElements);
        return std::all_of(partials, end, [](double sum) { return std::isfinite(sum); });
    }

    const Kernel& kernel_;
    std::unique_ptr<Team, Team::Ender> team_;
};

Arrays arrays(std::uintptr_t weights, std::uintptr_t low, std::uintptr_t out,
              const std::array<std::uintptr_t, kMaxStates>& states, std::uintptr_t grad) {
    Arrays made = {at<void>(weights), at<std::int16_t>(low), at<std::uint16_t>(out), {}, at<const void>(grad)};
    std::transform(states.begin(), states.end(), made.states, at<void>);
    return made;
}

// The names of the features that each kernel needs of the CPU.
std::map<std::string, std::string> requirements() {
    std::map<std::string, std::string> features;
    for (const Kernel* kernel : all_kernels()) features[kernel->name] = kernel->features;
    return features;
}

AdamScalars scalars(double coefficient, double decay, double l2, double beta2, double lerp_weight, double square_weight,
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
    module.def("requirements", requirements, "The CPU features that each kernel needs, separated by blanks.");
    py::enum_<GradFormat>(module, "GradFormat")
        .value("fp32", GradFormat::fp32)
        .value("bf16", GradFormat::bf16)
        .value("fp16", GradFormat::fp16);
    py::enum_<MasterFormat>(module, "MasterFormat")
        .value("fp32", MasterFormat::fp32)
        .value("split_bf16", MasterFormat::split_bf16)
        .value("fp32_out_bf16", MasterFormat::fp32_out_bf16)
        .value("fp32_out_fp16", MasterFormat::fp32_out_fp16);
    py::class_<AdamScalars>(module, "AdamScalars")
        .def(py::init(&scalars), py::kw_only(), py::arg("coefficient"), py::arg("decay"), py::arg("l2"), py::arg("beta2"),
             py::arg("lerp_weight"), py::arg("square_weight"), py::arg("root_correction"), py::arg("eps"),
             py::arg("step_size"));
    py::class_<Arrays>(module, "Arrays")
        .def(py::init(&arrays), py::kw_only(), py::arg("weights"), py::arg("low"), py::arg("out"), py::arg("states"),
             py::arg("grad"));
    py::class_<Run>(module, "Run")
        .def(py::init([](std::size_t start, std::size_t length, std::uintptr_t source, GradFormat format) {
                 return Run{start, length, source, format};
             }),
             py::arg("start"), py::arg("length"), py::arg("source"), py::arg("grad_format"));
    const auto without_gil = py::call_guard<py::gil_scoped_release>();
    py::class_<CpuAdam>(module, "CpuAdam")
        .def(py::init<const std::string&, std::size_t, std::size_t, std::size_t>(), py::arg("name"), py::kw_only(),
             py::arg("num_threads"), py::arg("share_index"), py::arg("num_shares"))
        .def_property_readonly("name", &CpuAdam::name)
        .def_property_readonly("num_threads", &CpuAdam::num_threads)
        .def("update", &CpuAdam::update, without_gil, py::arg("master"), py::arg("grad_format"), py::arg("num_elements"),
             py::arg("arrays"), py::arg("scalars"))
        .def("traffic", &CpuAdam::traffic, without_gil, py::arg("master"), py::arg("grad_format"), py::arg("num_elements"),
             py::arg("arrays"), py::arg("mask"))
        .def("sums_of_squares", &CpuAdam::sums_of_squares, without_gil, py::arg("grad_format"), py::arg("num_elements"),
             py::kw_only(), py::arg("grad"), py::arg("sums"))
        .def("arrive", &CpuAdam::arrive, without_gil, py::arg("runs"), py::arg("grad_format"), py::arg("num_elements"),
             py::kw_only(), py::arg("grad"), py::arg("sums"));
}
