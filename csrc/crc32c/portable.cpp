// For any CPU: eight bytes at a time by table. It is the reference.
#include "kernel.h"

namespace crc32c {

namespace {

// after[n][byte] is the state 0 after that byte and n bytes of zeros.
struct Tables {
    std::uint32_t after[8][256];
};

constexpr Tables make_tables() {
    Tables tables = {};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t word = byte;
        for (std::size_t zeros = 0; zeros < 8; ++zeros) {
            for (int bit = 0; bit < 8; ++bit) word = times_x(word);
            tables.after[zeros][byte] = word;
        }
    }
    return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t extend(std::uint32_t state, const unsigned char* data, std::size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        std::uint32_t next = 0;
        for (std::size_t i = 0; i < 8; ++i) {
            const std::uint32_t from_state = i < 4 ? state >> (8 * i) : 0;
            next ^= kTables.after[7 - i][(from_state ^ data[i]) & 0xFFu];
        }
        state = next;
    }
    for (; size > 0; ++data, --size) state = (state >> 8) ^ kTables.after[0][(state ^ *data) & 0xFFu];
    return state;
}

bool supported() { return true; }

}  // namespace

const Kernel kPortable = {"portable", supported, extend};

}  // namespace crc32c
