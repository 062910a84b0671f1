// The algorithm, once, over a vector type: included by each ISA file inside its namespace and target region, after it has
// defined `Vector` and included scalar_vector.h. So it includes nothing. docs/numerics.md says what is computed and why.
//
// Nothing here may be contracted, reordered or approximated: the order of operations is that of torch's single-tensor
// Adam, and every ISA must give the same bits.

constexpr std::uint32_t kSign = 0x80000000u;
constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr std::uint32_t kQuietNan = 0x7FC00000u;
constexpr std::uint32_t kLargestSplit = 0x7F7F7FFFu;  // the largest master that rounds to a finite bf16

template <class V>
static inline typename V::Float load_grad(const void* grad, std::size_t index, GradFormat format) {
    switch (format) {
        case GradFormat::bf16: return V::floats(V::left16(V::load_u16(grad, index)));
        case GradFormat::fp16: return V::load_fp16(grad, index);
        default: return V::load(static_cast<const float*>(grad) + index);
    }
}

// A master that split can hold: finite values beyond the largest are clamped to it, NaN becomes the one quiet NaN.
template <class V>
static inline typename V::Int splittable(typename V::Int bits) {
    const auto magnitude = V::and_int(bits, V::set_int(kMagnitude));
    const auto infinity = V::set_int(kInfinity), largest = V::set_int(kLargestSplit);
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
    const auto nan = V::or_int(V::and_int(half, V::set_int(0x8000u)), V::set_int(kQuietNan >> 16));
    return V::where_greater(V::and_int(bits, V::set_int(kMagnitude)), V::set_int(kInfinity), nan, rounded);
}

template <class V, MasterFormat master>
static inline typename V::Float load_master(const Arrays& arrays, std::size_t index) {
    if constexpr (master == MasterFormat::split_bf16) {
        return V::floats(V::add_int(V::left16(V::load_u16(arrays.weights, index)), V::load_s16(arrays.low + index)));
    } else {
        return V::load(static_cast<const float*>(arrays.weights) + index);
    }
}

template <class V, MasterFormat master>
static inline void store_master(const Arrays& arrays, std::size_t index, typename V::Float value, bool stream) {
    if constexpr (master == MasterFormat::split_bf16) {
        const auto bits = splittable<V>(V::bits(value));
        const auto high = V::right16(V::add_int(bits, V::set_int(0x8000u)));
        V::store_u16(static_cast<std::uint16_t*>(arrays.weights) + index, high);
        V::store_u16(arrays.low + index, V::sub_int(bits, V::left16(high)));
    } else {
        V::store(static_cast<float*>(arrays.weights) + index, value);
        if constexpr (master != MasterFormat::fp32) {
            const auto rounded = master == MasterFormat::fp32_out_bf16 ? to_bf16<V>(V::bits(value)) : V::to_fp16(value);
            if (stream) {
                V::stream_u16(arrays.out + index, rounded);
            } else {
                V::store_u16(arrays.out + index, rounded);
            }
        }
    }
}

template <class V, MasterFormat master, GradFormat grad_format>
static inline std::size_t update_from(const Arrays& arrays, const Scalars& scalars, std::size_t index, std::size_t end) {
    const auto coefficient = V::set(scalars.coefficient), decay = V::set(scalars.decay), l2 = V::set(scalars.l2);
    const auto beta2 = V::set(scalars.beta2), square_weight = V::set(scalars.square_weight);
    const auto root_correction = V::set(scalars.root_correction), eps = V::set(scalars.eps);
    const auto step_size = V::set(scalars.step_size);
    // Interpolates from the nearer end, as torch.lerp does: from the moment for a weight below a half, else from the gradient.
    const bool from_moment = scalars.lerp_weight < 0.5f, coupled = scalars.l2 != 0.0f;
    const auto lerp_weight = V::set(from_moment ? scalars.lerp_weight : scalars.lerp_weight - 1.0f);
    const bool stream = (reinterpret_cast<std::uintptr_t>(arrays.out) + 2 * index) % (2 * V::width) == 0;

    for (; index + V::width <= end; index += V::width) {
        auto grad = V::mul(load_grad<V>(arrays.grad, index, grad_format), coefficient);
        auto weight = V::mul(load_master<V, master>(arrays, index), decay);
        if (coupled) grad = V::add(grad, V::mul(l2, weight));

        auto moment = V::load(arrays.exp_avg + index);
        const auto change = V::mul(lerp_weight, V::sub(grad, moment));
        moment = V::add(from_moment ? moment : grad, change);
        V::store(arrays.exp_avg + index, moment);

        auto square = V::mul(V::load(arrays.exp_avg_sq + index), beta2);
        square = V::add(square, V::mul(V::mul(square_weight, grad), grad));
        V::store(arrays.exp_avg_sq + index, square);

        const auto denominator = V::add(V::div(V::sqrt(square), root_correction), eps);
        weight = V::add(weight, V::div(V::mul(step_size, moment), denominator));
        store_master<V, master>(arrays, index, weight, stream);
    }
    return index;
}

template <MasterFormat master, GradFormat grad_format>
static void update(const Arrays& arrays, const Scalars& scalars, std::size_t begin, std::size_t end) {
    const std::size_t tail = update_from<Vector, master, grad_format>(arrays, scalars, begin, end);
    update_from<ScalarVector, master, grad_format>(arrays, scalars, tail, end);
#if defined(__x86_64__)
    if constexpr (master == MasterFormat::fp32_out_bf16 || master == MasterFormat::fp32_out_fp16) {
        _mm_sfence();  // streamed stores are seen by other threads only after it
    }
#endif
}

template <GradFormat grad_format>
static void squares(const void* grad, std::size_t begin, std::size_t end, double* lanes) {
    constexpr std::size_t parts = Vector::width / Vector::double_width;
    typename Vector::Double sums[kLanes / Vector::double_width];
    for (auto& sum : sums) sum = Vector::zero_double();
    std::size_t index = begin;
    for (; index + kLanes <= end; index += kLanes) {
        for (std::size_t piece = 0; piece < kLanes / Vector::width; ++piece) {
            const auto values = load_grad<Vector>(grad, index + piece * Vector::width, grad_format);
            for (std::size_t part = 0; part < parts; ++part) {
                auto& sum = sums[piece * parts + part];
                sum = Vector::add_square(sum, Vector::to_double(values, part));
            }
        }
    }
    for (std::size_t piece = 0; piece < kLanes / Vector::double_width; ++piece) {
        Vector::store_double(lanes + piece * Vector::double_width, sums[piece]);
    }
    for (std::size_t lane = 0; index < end; ++index, ++lane) {
        lanes[lane] = ScalarVector::add_square(lanes[lane], static_cast<double>(load_grad<ScalarVector>(grad, index, grad_format)));
    }
}

template <MasterFormat master>
static UpdateFunction update_for(GradFormat grad_format) {
    switch (grad_format) {
        case GradFormat::bf16: return update<master, GradFormat::bf16>;
        case GradFormat::fp16: return update<master, GradFormat::fp16>;
        default: return update<master, GradFormat::fp32>;
    }
}

static UpdateFunction update_function(MasterFormat master, GradFormat grad_format) {
    switch (master) {
        case MasterFormat::split_bf16: return update_for<MasterFormat::split_bf16>(grad_format);
        case MasterFormat::fp32_out_bf16: return update_for<MasterFormat::fp32_out_bf16>(grad_format);
        case MasterFormat::fp32_out_fp16: return update_for<MasterFormat::fp32_out_fp16>(grad_format);
        default: return update_for<MasterFormat::fp32>(grad_format);
    }
}

static SquaresFunction squares_function(GradFormat grad_format) {
    switch (grad_format) {
        case GradFormat::bf16: return squares<GradFormat::bf16>;
        case GradFormat::fp16: return squares<GradFormat::fp16>;
        default: return squares<GradFormat::fp32>;
    }
}
