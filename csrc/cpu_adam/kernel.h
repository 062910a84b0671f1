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

// Each is rounded to fp32 once, from the double that it was computed in.
struct Scalars {
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

// Addresses of the first element of each array; all arrays have the same number of elements.
struct Arrays {
    void* weights;
    std::int16_t* low;   // split_bf16 only
    std::uint16_t* out;  // fp32_out_* only
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
};

using UpdateFunction = void (*)(const Arrays&, const Scalars&, std::size_t begin, std::size_t end);
// Fills lanes[16] with the sums of squares of elements begin + i, i mod 16 = lane.
using SquaresFunction = void (*)(const void* grad, std::size_t begin, std::size_t end, double* lanes);

struct Kernel {
    const char* name;
    bool (*supported)();
    UpdateFunction (*update)(MasterFormat, GradFormat);
    SquaresFunction (*squares)(GradFormat);
};

extern const Kernel kScalar;
#if defined(__x86_64__)
extern const Kernel kAvx2;
extern const Kernel kAvx512;
#endif

}  // namespace cpu_adam
