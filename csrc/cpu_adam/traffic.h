// The bytes of an update without its arithmetic: the limit that a kernel is measured against. Included by body.h.

template <class V, GradFormat format>
static inline typename V::Int load_bits(const void* grad, std::size_t index) {
    if constexpr (format == GradFormat::fp32) return V::bits(V::load(static_cast<const float*>(grad) + index));
    return V::load_u16(grad, index);
}

// The mask is known only at run time, so that no read and no write can be left out.
template <class V, template <class> class Rule, MasterFormat master, GradFormat grad_format>
static inline std::size_t traffic_from(const Arrays arrays, std::uint32_t mask, std::size_t index, std::size_t end) {
    const auto kept = V::set_int(mask);
    const bool stream = may_stream<V>(arrays, index);
    for (; index + V::width <= end; index += V::width) {
        const auto grad = V::and_int(kept, load_bits<V, grad_format>(arrays.grad, index));
        for (std::size_t plane = 0; plane < Rule<V>::num_states; ++plane) {
            const auto state = V::bits(load_state<V>(arrays.states[plane], index, Rule<V>::states[plane]));
            store_state<V>(arrays.states[plane], index, V::floats(V::or_int(state, grad)), Rule<V>::states[plane]);
        }
        if constexpr (master == MasterFormat::split_bf16) {
            auto* const weights = static_cast<std::uint16_t*>(arrays.weights) + index;
            V::store_u16(weights, V::or_int(V::load_u16(weights, 0), grad));
            V::store_u16(arrays.low + index, V::or_int(V::load_s16(arrays.low + index), grad));
        } else {
            float* const weights = static_cast<float*>(arrays.weights) + index;
            const auto weight = V::or_int(V::bits(V::load(weights)), grad);
            V::store(weights, V::floats(weight));
            if constexpr (master != MasterFormat::fp32) store_out<V>(arrays, index, V::right16(weight), stream);
        }
    }
    return index;
}

template <template <class> class Rule, MasterFormat master, GradFormat grad_format>
static void traffic(const Arrays& arrays, std::uint32_t mask, std::size_t begin, std::size_t end) {
    const std::size_t tail = traffic_from<Vector, Rule, master, grad_format>(arrays, mask, begin, end);
    traffic_from<ScalarVector, Rule, master, grad_format>(arrays, mask, tail, end);
    end_stream<master>();
}
