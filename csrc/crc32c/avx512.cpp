// AVX-512 and VPCLMULQDQ: 64 bytes at a time are folded onto those that come later, by carry-less multiplication.
#if defined(__x86_64__)

#include <immintrin.h>

#include "kernel.h"

// gcc 12 takes the placeholder operands of its own header for variables that somebody forgot to set.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,vpclmulqdq,sse4.2,pclmul")

namespace crc32c {

namespace {

// Registers that are folded side by side: enough to hide the multiplication's latency.
constexpr std::size_t kRegisters = 8;
constexpr std::size_t kVectorBytes = 64;
constexpr std::size_t kRoundBytes = kRegisters * kVectorBytes;

// What folds 16 bytes onto those that are `distance` bytes later: x^(8 distance) for the last 8 bytes, x^64 more for the
// first 8. Of that, the product of 64 bits and a word in the low half of 64 brings x^33 with it.
template <std::size_t distance>
inline __m128i factors() {
    constexpr std::uint32_t of_first = power_of_x(8 * distance + 31), of_last = power_of_x(8 * distance - 33);
    return _mm_set_epi64x(of_last, of_first);
}

inline __m512i load(const unsigned char* from) { return _mm512_loadu_si512(from); }

inline __m512i fold(__m512i bytes, __m512i by, __m512i onto) {
    constexpr int exclusive_or_of_three = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(bytes, by, 0x00), _mm512_clmulepi64_epi128(bytes, by, 0x11),
                                     onto, exclusive_or_of_three);
}

inline __m128i fold(__m128i bytes, __m128i by, __m128i onto) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(bytes, by, 0x00), _mm_clmulepi64_si128(bytes, by, 0x11)), onto);
}

inline std::uint32_t crc_of(__m128i bytes) {
    const std::uint64_t first = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(bytes)));
    return static_cast<std::uint32_t>(_mm_crc32_u64(first, static_cast<std::uint64_t>(_mm_extract_epi64(bytes, 1))));
}

std::uint32_t extend(std::uint32_t state, const unsigned char* data, std::size_t size) {
    if (size < kRoundBytes) return kSse42.extend(state, data, size);
    __m512i folded[kRegisters];
    for (std::size_t i = 0; i < kRegisters; ++i) folded[i] = load(data + i * kVectorBytes);
    folded[0] = _mm512_xor_si512(folded[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    const __m512i by_round = _mm512_broadcast_i32x4(factors<kRoundBytes>());
    for (data += kRoundBytes, size -= kRoundBytes; size >= kRoundBytes; data += kRoundBytes, size -= kRoundBytes) {
        for (std::size_t i = 0; i < kRegisters; ++i) folded[i] = fold(folded[i], by_round, load(data + i * kVectorBytes));
    }
    const __m512i by_vector = _mm512_broadcast_i32x4(factors<kVectorBytes>());
    __m512i last = folded[0];
    for (std::size_t i = 1; i < kRegisters; ++i) last = fold(last, by_vector, folded[i]);
    for (; size >= kVectorBytes; data += kVectorBytes, size -= kVectorBytes) last = fold(last, by_vector, load(data));
    const __m128i by_lane = factors<16>();
    __m128i bytes = _mm512_castsi512_si128(last);
    bytes = fold(bytes, by_lane, _mm512_extracti32x4_epi32(last, 1));
    bytes = fold(bytes, by_lane, _mm512_extracti32x4_epi32(last, 2));
    bytes = fold(bytes, by_lane, _mm512_extracti32x4_epi32(last, 3));
    return kSse42.extend(crc_of(bytes), data, size);
}

bool supported() {
    return kSse42.supported() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

}  // namespace

const Kernel kAvx512 = {"avx512", supported, extend};

}  // namespace crc32c

#pragma GCC pop_options

#endif
