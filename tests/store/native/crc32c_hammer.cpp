// Drives every CRC32C kernel that this CPU has for the sanitizers: any alignment, and memory that ends where its page ends.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "kernel.h"

namespace {

constexpr std::size_t kPage = 4096, kPages = 8, kBytes = kPages * kPage;

std::vector<const crc32c::Kernel*> kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const std::vector<const crc32c::Kernel*> all = {&crc32c::kSse42, &crc32c::kAvx512};
#elif defined(__aarch64__) && defined(__linux__)
    const std::vector<const crc32c::Kernel*> all = {&crc32c::kArm};
#else
    const std::vector<const crc32c::Kernel*> all;
#endif
    std::vector<const crc32c::Kernel*> found;
    for (const crc32c::Kernel* kernel : all) {
        if (kernel->supported()) found.push_back(kernel);
    }
    return found;
}

// The lengths at which a kernel goes another way are 8, 64, 384, 512, 12,288 and 24,576 bytes.
std::vector<std::size_t> lengths() {
    std::vector<std::size_t> found;
    for (std::size_t length = 0; length < 1100; ++length) found.push_back(length);
    for (const std::size_t around : {std::size_t{12288}, std::size_t{24576}}) {
        for (std::size_t length = around - 70; length < around + 70; ++length) found.push_back(length);
    }
    return found;
}

bool agree(const unsigned char* data, std::size_t length) {
    const std::uint32_t expected = crc32c::kPortable.extend(~0u, data, length);
    for (const crc32c::Kernel* kernel : kernels()) {
        if (kernel->extend(~0u, data, length) == expected) continue;
        std::fprintf(stderr, "%s: another value for %zu bytes at %p\n", kernel->name, length, static_cast<const void*>(data));
        return false;
    }
    return true;
}

}  // namespace

int main() {
    // One page before and one behind may not be touched; the sanitizer watches the copies on the heap as closely.
    void* const mapped = mmap(nullptr, kBytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return 2;
    unsigned char* const first = static_cast<unsigned char*>(mapped) + kPage;
    if (mprotect(first, kBytes, PROT_READ | PROT_WRITE) != 0) return 2;
    for (std::size_t i = 0; i < kBytes; ++i) first[i] = static_cast<unsigned char>(i * i % 251);
    for (const std::size_t length : lengths()) {
        if (!agree(first + kBytes - length, length)) return 1;  // to the last byte, from any alignment
        if (!agree(first, length) || !agree(first + 1, length)) return 1;
        const std::vector<unsigned char> copy(first, first + length);
        if (!agree(copy.data(), length)) return 1;
    }
    return 0;
}
