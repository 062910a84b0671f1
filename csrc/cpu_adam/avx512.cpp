// AVX-512F: 16 elements at a time.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "kernel.h"

// gcc 12 takes the placeholder operands of its own header for variables that somebody forgot to set.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f")

namespace cpu_adam::avx512 {

#include "scalar_vector.h"

struct Vector {
    static constexpr std::size_t width = 16;
    static constexpr std::size_t double_width = 8;
    using Float = __m512;
    using Int = __m512i;
    using Double = __m512d;

    static Float set(float value) { return _mm512_set1_ps(value); }
    static Float load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Float value) { _mm512_storeu_ps(to, value); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }

    static Int bits(Float value) { return _mm512_castps_si512(value); }
    static Float floats(Int value) { return _mm512_castsi512_ps(value); }
    static Int set_int(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    static __m256i load_16(const void* from, std::size_t index) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(from) + index));
    }
    static Int load_u16(const void* from, std::size_t index) { return _mm512_cvtepu16_epi32(load_16(from, index)); }
    static Int load_s16(const std::int16_t* from) { return _mm512_cvtepi16_epi32(load_16(from, 0)); }
    static void store_u16(void* to, Int value) {
        _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
    }
    static void stream_u16(void* to, Int value) {
        _mm256_stream_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
    }
    static Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
    static Int and_int(Int a, Int b) { return _mm512_and_si512(a, b); }
    static Int or_int(Int a, Int b) { return _mm512_or_si512(a, b); }
    static Int left16(Int a) { return _mm512_slli_epi32(a, 16); }
    static Int right16(Int a) { return _mm512_srli_epi32(a, 16); }
    static bool any_greater(Int a, Int b) { return _mm512_cmpgt_epi32_mask(a, b) != 0; }
    static Int where_greater(Int a, Int b, Int yes, Int no) {
        return _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), no, yes);
    }

    static Float load_fp16(const void* from, std::size_t index) { return _mm512_cvtph_ps(load_16(from, index)); }
    static Int to_fp16(Float value) {
        return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }

    static Double zero_double() { return _mm512_setzero_pd(); }
    static Double to_double(Float value, std::size_t part) {
        const __m512d halves = _mm512_castps_pd(value);
        const __m256d half = part == 0 ? _mm512_castpd512_pd256(halves) : _mm512_extractf64x4_pd(halves, 1);
        return _mm512_cvtps_pd(_mm256_castpd_ps(half));
    }
    static Double add_square(Double sum, Double value) { return _mm512_add_pd(sum, _mm512_mul_pd(value, value)); }
    static Double load_double(const double* from) { return _mm512_loadu_pd(from); }
    static void store_double(double* to, Double value) { _mm512_storeu_pd(to, value); }
};

#include "body.h"

}  // namespace cpu_adam::avx512

#pragma GCC pop_options

namespace cpu_adam {

static bool avx512_supported() { return __builtin_cpu_supports("avx512f"); }

const Kernel kAvx512 = {
    "avx512", "avx512f", avx512_supported, avx512::update_function<avx512::Adam>, avx512::traffic_function<avx512::Adam>,
    avx512::squares_function, avx512::arrival_function,
};

}  // namespace cpu_adam

#endif
