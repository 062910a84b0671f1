// The reference: one element at a time, for any CPU.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>

#include "kernel.h"

namespace cpu_adam::scalar {

#include "scalar_vector.h"

using Vector = ScalarVector;

#include "body.h"

}  // namespace cpu_adam::scalar

namespace cpu_adam {

static bool scalar_supported() { return true; }

const Kernel kScalar = {
    "scalar", "", scalar_supported, scalar::update_function<scalar::Adam>, scalar::traffic_function<scalar::Adam>,
    scalar::squares_function, scalar::arrival_function,
};

}  // namespace cpu_adam
