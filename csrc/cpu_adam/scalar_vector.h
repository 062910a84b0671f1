// The vocabulary of body.h for one element at a time; it is the reference, and serves the tail of every other ISA.
// Included inside a namespace and target region, after <cmath>, <cstring> and <cstdint>; so it includes nothing.

static inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Memory is copied, not dereferenced: a gradient may be rounded into the front of the array that it is read from.
template <class T>
static inline T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
static inline void write(void* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

struct ScalarVector {
    static constexpr std::size_t width = 1;
    static constexpr std::size_t double_width = 1;
    using Float = float;
    using Int = std::uint32_t;
    using Double = double;

    static Float set(float value) { return value; }
    static Float load(const float* from) { return read<float>(from); }
    static void store(float* to, Float value) { write(to, value); }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float sqrt(Float a) { return __builtin_sqrtf(a); }

    static Int bits(Float value) { return bits_of(value); }
    static Float floats(Int value) { return float_of(value); }
    static Int set_int(std::uint32_t value) { return value; }
    static Int load_u16(const void* from, std::size_t index) {
        return read<std::uint16_t>(static_cast<const std::uint16_t*>(from) + index);
    }
    static Int load_s16(const std::int16_t* from) {
        return static_cast<std::uint32_t>(static_cast<std::int32_t>(read<std::int16_t>(from)));
    }
    static void store_u16(void* to, Int value) { write(to, static_cast<std::uint16_t>(value)); }
    static void stream_u16(void* to, Int value) { store_u16(to, value); }
    static Int add_int(Int a, Int b) { return a + b; }
    static Int and_int(Int a, Int b) { return a & b; }
    static Int or_int(Int a, Int b) { return a | b; }
    static Int left16(Int a) { return a << 16; }
    static Int right16(Int a) { return a >> 16; }
    // Signed comparisons: all their operands are below 2^31.
    static bool any_greater(Int a, Int b) { return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b); }
    static Int where_greater(Int a, Int b, Int yes, Int no) {
        return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? yes : no;
    }

    // Exact, subnormals included; a signalling NaN becomes quiet, as the instruction does it.
    static Float load_fp16(const void* from, std::size_t index) {
        const std::uint32_t half = load_u16(from, index), sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
        if (magnitude > 0x7C00u) return float_of(sign | 0x7FC00000u | (magnitude << 13));
        if (magnitude == 0x7C00u) return float_of(sign | 0x7F800000u);
        if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
        return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
    }
    // To nearest, ties to even; too large becomes infinity, small values become subnormal.
    static Int to_fp16(Float value) {
        const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        if (magnitude > 0x7F800000u) return sign | 0x7E00u | ((magnitude >> 13) & 0x03FFu);
        if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
        if (magnitude >= 0x38800000u) return sign | ((magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13);
        // Adding 0.5 makes the hardware round at 2^-24, the spacing of fp16 subnormals.
        return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u);
    }

    static Double zero_double() { return 0.0; }
    static Double to_double(Float value, std::size_t) { return static_cast<double>(value); }
    static Double add_square(Double sum, Double value) { return sum + value * value; }
    static Double load_double(const double* from) { return *from; }
    static void store_double(double* to, Double value) { *to = value; }
};
