// Arm: the CPU's own CRC32C of eight bytes, on three streams at a time, for one can begin in each cycle.
#if defined(__aarch64__) && defined(__linux__)

#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "kernel.h"

namespace crc32c {

namespace {

constexpr std::size_t kStream = 8192;  // long enough that joining three costs nothing beside them

inline std::uint64_t load(const unsigned char* from) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// The state after `kStream` bytes of zeros: the product of two polynomials, by the powers of x in the second.
inline std::uint32_t after_zeros(std::uint32_t state) {
    constexpr std::uint32_t factor = power_of_x(8 * kStream);
    std::uint32_t product = 0;
    for (std::uint32_t power = 0x80000000u; power != 0; power >>= 1) {
        if (factor & power) product ^= state;
        state = times_x(state);
    }
    return product;
}

__attribute__((target("+crc"))) std::uint32_t extend(std::uint32_t state, const unsigned char* data, std::size_t size) {
    for (; size >= 3 * kStream; data += 3 * kStream, size -= 3 * kStream) {
        std::uint32_t first = state, second = 0, third = 0;
        for (std::size_t i = 0; i < kStream; i += 8) {
            first = __crc32cd(first, load(data + i));
            second = __crc32cd(second, load(data + kStream + i));
            third = __crc32cd(third, load(data + 2 * kStream + i));
        }
        state = after_zeros(after_zeros(first) ^ second) ^ third;
    }
    for (; size >= 8; data += 8, size -= 8) state = __crc32cd(state, load(data));
    for (; size > 0; ++data, --size) state = __crc32cb(state, *data);
    return state;
}

bool supported() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

}  // namespace

const Kernel kArm = {"arm", supported, extend};

}  // namespace crc32c

#endif
