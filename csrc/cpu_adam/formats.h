// How gradients, states and masters are stored, and their way to fp32 and back. Included by body.h.

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr std::uint32_t kQuietNan = 0x7FC00000u;
constexpr std::uint32_t kLargestSplit = 0x7F7F7FFFu;  // the largest master that rounds to a finite bf16

// A master that split can hold: finite values beyond the largest are clamped to it, NaN becomes the one quiet NaN. Hardly
// any vector has such values: asking first costs less than choosing.
template <class V>
static inline typename V::Int splittable(typename V::Int bits) {
    const auto magnitude = V::and_int(bits, V::set_int(kMagnitude));
    const auto infinity = V::set_int(kInfinity), largest = V::set_int(kLargestSplit);
    if (!V::any_greater(magnitude, largest)) return bits;
    const auto clamped = V::where_greater(infinity, magnitude, largest, magnitude);
    const auto special = V::where_greater(magnitude, infinity, V::set_int(kQuietNan), clamped);
    const auto held = V::where_greater(magnitude, largest, special, magnitude);
    return V::or_int(held, V::and_int(bits, V::set_int(kSign)));
}

// To nearest, ties to even; NaN becomes a quiet NaN with its sign.
template <class V>
static inline typename V::Int to_bf16(typename V::Int bits) {
    const auto half = V::right16(bits);
    const auto odd = V::and_int(half, V::set_int(1));
    const auto rounded = V::right16(V::add_int(bits, V::add_int(odd, V::set_int(0x7FFFu))));
    const auto magnitude = V::and_int(bits, V::set_int(kMagnitude)), infinity = V::set_int(kInfinity);
    if (!V::any_greater(magnitude, infinity)) return rounded;
    const auto nan = V::or_int(V::and_int(half, V::set_int(0x8000u)), V::set_int(kQuietNan >> 16));
    return V::where_greater(magnitude, infinity, nan, rounded);
}

template <class V>
static inline typename V::Float load_grad(const void* grad, std::size_t index, GradFormat format) {
    switch (format) {
        case GradFormat::bf16: return V::floats(V::left16(V::load_u16(grad, index)));
        case GradFormat::fp16: return V::load_fp16(grad, index);
        default: return V::load(static_cast<const float*>(grad) + index);
    }
}

// To nearest, ties to even.
template <class V>
static inline void store_grad(void* grad, std::size_t index, typename V::Float value, GradFormat format) {
    switch (format) {
        case GradFormat::bf16: return V::store_u16(static_cast<std::uint16_t*>(grad) + index, to_bf16<V>(V::bits(value)));
        case GradFormat::fp16: return V::store_u16(static_cast<std::uint16_t*>(grad) + index, V::to_fp16(value));
        default: return V::store(static_cast<float*>(grad) + index, value);
    }
}

template <class V>
static inline typename V::Float load_state(const void* plane, std::size_t index, StateFormat format) {
    switch (format) {
        default: return V::load(static_cast<const float*>(plane) + index);
    }
}

template <class V>
static inline void store_state(void* plane, std::size_t index, typename V::Float value, StateFormat format) {
    switch (format) {
        default: return V::store(static_cast<float*>(plane) + index, value);
    }
}

template <class V, MasterFormat master>
static inline typename V::Float load_master(const Arrays& arrays, std::size_t index) {
    if constexpr (master == MasterFormat::split_bf16) {
        return V::floats(V::add_int(V::left16(V::load_u16(arrays.weights, index)), V::load_s16(arrays.low + index)));
    } else {
        return V::load(static_cast<const float*>(arrays.weights) + index);
    }
}

template <class V>
static inline void store_out(const Arrays& arrays, std::size_t index, typename V::Int rounded, bool stream) {
    if (stream) {
        V::stream_u16(arrays.out + index, rounded);
    } else {
        V::store_u16(arrays.out + index, rounded);
    }
}

template <class V, MasterFormat master>
static inline void store_master(const Arrays& arrays, std::size_t index, typename V::Float value, bool stream) {
    if constexpr (master == MasterFormat::split_bf16) {
        const auto bits = splittable<V>(V::bits(value));
        const auto high = V::right16(V::add_int(bits, V::set_int(0x8000u)));
        V::store_u16(static_cast<std::uint16_t*>(arrays.weights) + index, high);
        V::store_u16(arrays.low + index, bits);  // the low 16 bits of bits - (high << 16) are those of bits
    } else {
        V::store(static_cast<float*>(arrays.weights) + index, value);
        if constexpr (master == MasterFormat::fp32_out_bf16) store_out<V>(arrays, index, to_bf16<V>(V::bits(value)), stream);
        if constexpr (master == MasterFormat::fp32_out_fp16) store_out<V>(arrays, index, V::to_fp16(value), stream);
    }
}
