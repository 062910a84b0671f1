// SSE4.2: the CPU's own CRC32C of eight bytes, on three streams at a time, for it takes three cycles and one can begin in each.
#if defined(__x86_64__)

#include <nmmintrin.h>
#include <wmmintrin.h>

#include <cstring>

#include "kernel.h"

#pragma GCC push_options
#pragma GCC target("sse4.2,pclmul")

namespace crc32c {

namespace {

// Long streams make joining them free, short ones leave few bytes to a single stream.
constexpr std::size_t kLongStream = 4096;
constexpr std::size_t kShortStream = 128;

inline std::uint64_t load(const unsigned char* from) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// The state after `size` bytes of zeros: multiplied by x^(8 size). Of that, the carry-less product of two words brings x with
// it, for its 63 bits are read as 64; and the CRC of those 64 bits multiplies by x^32.
template <std::size_t size>
inline std::uint64_t after_zeros(std::uint64_t state) {
    constexpr std::uint32_t factor = power_of_x(8 * size - 33);
    const __m128i product = _mm_clmulepi64_si128(
        _mm_cvtsi64_si128(static_cast<long long>(state)), _mm_cvtsi32_si128(static_cast<int>(factor)), 0x00);
    return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

template <std::size_t stream>
inline std::uint64_t three_streams(std::uint64_t state, const unsigned char*& data, std::size_t& size) {
    for (; size >= 3 * stream; data += 3 * stream, size -= 3 * stream) {
        std::uint64_t first = state, second = 0, third = 0;
        for (std::size_t i = 0; i < stream; i += 8) {
            first = _mm_crc32_u64(first, load(data + i));
            second = _mm_crc32_u64(second, load(data + stream + i));
            third = _mm_crc32_u64(third, load(data + 2 * stream + i));
        }
        state = after_zeros<stream>(after_zeros<stream>(first) ^ second) ^ third;
    }
    return state;
}

std::uint32_t extend(std::uint32_t start, const unsigned char* data, std::size_t size) {
    std::uint64_t state = start;
    state = three_streams<kLongStream>(state, data, size);
    state = three_streams<kShortStream>(state, data, size);
    for (; size >= 8; data += 8, size -= 8) state = _mm_crc32_u64(state, load(data));
    std::uint32_t end = static_cast<std::uint32_t>(state);
    for (; size > 0; ++data, --size) end = _mm_crc32_u8(end, *data);
    return end;
}

bool supported() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

}  // namespace

const Kernel kSse42 = {"sse4.2", supported, extend};

}  // namespace crc32c

#pragma GCC pop_options

#endif
