// AVX2 + F16C: 8 elements at a time.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

namespace cpu_adam::avx2 {

#include "scalar_vector.h"

struct Vector {
    static constexpr std::size_t width = 8;
    static constexpr std::size_t double_width = 4;
    using Float = __m256;
    using Int = __m256i;
    using Double = __m256d;

    static Float set(float value) { return _mm256_set1_ps(value); }
    static Float load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Float value) { _mm256_storeu_ps(to, value); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }

    static Int bits(Float value) { return _mm256_castps_si256(value); }
    static Float floats(Int value) { return _mm256_castsi256_ps(value); }
    static Int set_int(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
    static __m128i load_16(const void* from, std::size_t index) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(from) + index));
    }
    static Int load_u16(const void* from, std::size_t index) { return _mm256_cvtepu16_epi32(load_16(from, index)); }
    static Int load_s16(const std::int16_t* from) { return _mm256_cvtepi16_epi32(load_16(from, 0)); }
    // The low 16 bits of each element: shuffled, because the only pack instruction saturates.
    static __m128i low_halves(Int value) {
        const __m128i bytes = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
        const Int packed = _mm256_shuffle_epi8(value, _mm256_broadcastsi128_si256(bytes));
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }
    static void store_u16(void* to, Int value) { _mm_storeu_si128(static_cast<__m128i*>(to), low_halves(value)); }
    static void stream_u16(void* to, Int value) { _mm_stream_si128(static_cast<__m128i*>(to), low_halves(value)); }
    static Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
    static Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
    static Int or_int(Int a, Int b) { return _mm256_or_si256(a, b); }
    static Int left16(Int a) { return _mm256_slli_epi32(a, 16); }
    static Int right16(Int a) { return _mm256_srli_epi32(a, 16); }
    static bool any_greater(Int a, Int b) {
        const Int greater = _mm256_cmpgt_epi32(a, b);
        return !_mm256_testz_si256(greater, greater);
    }
    static Int where_greater(Int a, Int b, Int yes, Int no) {
        return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b));
    }

    static Float load_fp16(const void* from, std::size_t index) { return _mm256_cvtph_ps(load_16(from, index)); }
    static Int to_fp16(Float value) {
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }

    static Double zero_double() { return _mm256_setzero_pd(); }
    static Double to_double(Float value, std::size_t part) {
        return _mm256_cvtps_pd(part == 0 ? _mm256_castps256_ps128(value) : _mm256_extractf128_ps(value, 1));
    }
    static Double add_square(Double sum, Double value) { return _mm256_add_pd(sum, _mm256_mul_pd(value, value)); }
    static Double load_double(const double* from) { return _mm256_loadu_pd(from); }
    static void store_double(double* to, Double value) { _mm256_storeu_pd(to, value); }
};

#include "body.h"

}  // namespace cpu_adam::avx2

#pragma GCC pop_options

namespace cpu_adam {

static bool avx2_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

const Kernel kAvx2 = {
    "avx2", "avx2 f16c", avx2_supported, avx2::update_function<avx2::Adam>, avx2::traffic_function<avx2::Adam>,
    avx2::squares_function, avx2::arrival_function,
};

}  // namespace cpu_adam

#endif
