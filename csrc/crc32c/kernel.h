// CRC32C over memory: one table of functions an instruction set, and the arithmetic that all of them rest on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crc32c {

struct Kernel {
    const char* name;
    bool (*supported)();
    // Takes the state over the next bytes. A state is the CRC before its last inversion.
    std::uint32_t (*extend)(std::uint32_t state, const unsigned char* data, std::size_t size);
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kSse42;
extern const Kernel kAvx512;
#elif defined(__aarch64__) && defined(__linux__)
extern const Kernel kArm;
#endif

// A word is a polynomial over GF(2) of degree below 32: bit i is the coefficient of x^(31 - i), as the first bit of a
// message is its highest power. All is modulo Castagnoli's polynomial, of which the word leaves out x^32.
constexpr std::uint32_t kPolynomial = 0x82F63B78u;

constexpr std::uint32_t times_x(std::uint32_t word) { return (word >> 1) ^ ((word & 1u) ? kPolynomial : 0u); }

constexpr std::uint32_t power_of_x(std::size_t exponent) {
    std::uint32_t word = 0x80000000u;
    for (std::size_t i = 0; i < exponent; ++i) word = times_x(word);
    return word;
}

}  // namespace crc32c
