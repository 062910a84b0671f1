// What a kernel takes and gives: plain structs of addresses, lengths and fp32 scalars. One table of functions an ISA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_adam {

// Elements that share one fp64 partial sum of squares; also the quantum of work for threads in that pass.
constexpr std::size_t kBlockElements = 4096;
// fp64 accumulators of a block: element i of the block is added to accumulator i mod 16, on every ISA.
constexpr std::size_t kLanes = 16;

enum class GradFormat { fp32, bf16, fp16 };

enum class MasterFormat {
    fp32,           // weights are the master
    split_bf16,     // weights are bf16, the high half of the master; `low` holds the other 16 bits
    fp32_out_bf16,  // weights are the master; `out` receives them rounded to bf16
    fp32_out_fp16,  // weights are the master; `out` receives them rounded to fp16
};

// How one plane of optimizer state is stored. A reduced state is a member more, with its load and store in body.h.
enum class StateFormat { fp32 };

// The most planes of state that a rule has. adam.h says which Adam has: exp_avg, exp_avg_sq.
constexpr std::size_t kMaxStates = 2;

// Addresses of the first element of each array; all arrays have the same number of elements.
struct Arrays {
    void* weights;
    std::int16_t* low;   // split_bf16 only
    std::uint16_t* out;  // fp32_out_* only
    void* states[kMaxStates];
    const void* grad;
};

// What Adam takes beside the arrays. Each is rounded to fp32 once, from the double that it was computed in.
struct AdamScalars {
    float coefficient;   // the gradient is multiplied by it: unscale and clip
    float decay;         // 1 - lr * weight_decay where decoupled, else 1
    float l2;            // weight_decay where coupled, else 0
    float beta2;
    float lerp_weight;   // 1 - beta1
    float square_weight; // 1 - beta2
    float root_correction;  // sqrt(1 - beta2^step)
    float eps;
    float step_size;     // -lr / (1 - beta1^step)
};

template <class Scalars>
using UpdateFunction = void (*)(const Arrays&, const Scalars&, std::size_t begin, std::size_t end);
// Reads and writes what an update does, for no result. With a `mask` of 0 every array but `out` keeps its bits.
using TrafficFunction = void (*)(const Arrays&, std::uint32_t mask, std::size_t begin, std::size_t end);
// Adds the squares of elements begin ... end - 1 to lanes[16], element i to lane i mod 16.
using SquaresFunction = void (*)(const void* grad, std::size_t begin, std::size_t end, double* lanes);
// The same for `source` rounded to the format of `grad`, which receives it: source[0] goes to grad[begin].
using ArrivalFunction = void (*)(const void* source, void* grad, std::size_t begin, std::size_t end, double* lanes);

// One instruction set.
struct Kernel {
    const char* name;
    const char* features;  // that it needs, by the names that Linux gives them in /proc/cpuinfo; blanks between
    bool (*supported)();
    UpdateFunction<AdamScalars> (*adam)(MasterFormat, GradFormat);
    TrafficFunction (*adam_traffic)(MasterFormat, GradFormat);
    SquaresFunction (*squares)(GradFormat);
    ArrivalFunction (*arrival)(GradFormat source, GradFormat grad);
};

extern const Kernel kScalar;
#if defined(__x86_64__)
extern const Kernel kAvx2;
extern const Kernel kAvx512;
#endif

}  // namespace cpu_adam
