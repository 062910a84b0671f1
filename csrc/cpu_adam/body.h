// The loop over the elements, once, over a vector type and an update rule: included by each ISA file inside its namespace
// and target region, after it has defined `Vector` and included scalar_vector.h. So it includes nothing but its own parts.
// docs/numerics.md says what is computed and why.
//
// Nothing here may be contracted, reordered or approximated: every ISA must give the same bits.

#include "formats.h"

#include "adam.h"
#include "gradients.h"

// A separate low-precision weight is written past the caches, where its address allows it.
template <class V>
static inline bool may_stream(const Arrays& arrays, std::size_t index) {
    return reinterpret_cast<std::uintptr_t>(arrays.out + index) % (V::width * sizeof *arrays.out) == 0;
}

template <MasterFormat master>
static inline void end_stream() {
#if defined(__x86_64__)
    if constexpr (master == MasterFormat::fp32_out_bf16 || master == MasterFormat::fp32_out_fp16) {
        _mm_sfence();  // streamed stores are seen by other threads only after it
    }
#endif
}

// How far ahead of its loads every stream is asked for: across the ends of pages, where hardware prefetchers stop. Inlined
// before anything else, because a function that only prefetches counts as one without effect.
constexpr std::size_t kBytesAhead = 2048;

template <std::size_t element_bytes>
__attribute__((always_inline)) static inline void ask_ahead(const void* stream, std::size_t index) {
    const auto address = reinterpret_cast<std::uintptr_t>(stream) + element_bytes * index + kBytesAhead;
    __builtin_prefetch(reinterpret_cast<const void*>(address));  // beyond the end of the array it does nothing
}

template <std::size_t num_states, MasterFormat master, GradFormat grad_format>
__attribute__((always_inline)) static inline void ask_ahead(const Arrays& arrays, std::size_t index) {
    constexpr bool is_split = master == MasterFormat::split_bf16;
    for (std::size_t plane = 0; plane < num_states; ++plane) ask_ahead<sizeof(float)>(arrays.states[plane], index);
    ask_ahead<is_split ? sizeof(std::uint16_t) : sizeof(float)>(arrays.weights, index);
    if constexpr (is_split) ask_ahead<sizeof(std::int16_t)>(arrays.low, index);
    ask_ahead<grad_format == GradFormat::fp32 ? sizeof(float) : sizeof(std::uint16_t)>(arrays.grad, index);
}

template <class V, template <class> class Rule, MasterFormat master, GradFormat grad_format>
static inline std::size_t update_from(
    const Arrays arrays, const typename Rule<V>::Scalars& scalars, std::size_t index, std::size_t end
) {
    const Rule<V> rule(scalars);
    const bool stream = may_stream<V>(arrays, index);
    for (; index + V::width <= end; index += V::width) {
        if constexpr (V::width > 1) ask_ahead<Rule<V>::num_states, master, grad_format>(arrays, index);
        typename V::Float state[Rule<V>::num_states];
        for (std::size_t plane = 0; plane < Rule<V>::num_states; ++plane) {
            state[plane] = load_state<V>(arrays.states[plane], index, Rule<V>::states[plane]);
        }
        const auto grad = load_grad<V>(arrays.grad, index, grad_format);
        const auto weight = rule.step(grad, load_master<V, master>(arrays, index), state);
        for (std::size_t plane = 0; plane < Rule<V>::num_states; ++plane) {
            store_state<V>(arrays.states[plane], index, state[plane], Rule<V>::states[plane]);
        }
        store_master<V, master>(arrays, index, weight, stream);
    }
    return index;
}

template <template <class> class Rule, MasterFormat master, GradFormat grad_format>
static void update(
    const Arrays& arrays, const typename Rule<Vector>::Scalars& scalars, std::size_t begin, std::size_t end
) {
    const std::size_t tail = update_from<Vector, Rule, master, grad_format>(arrays, scalars, begin, end);
    update_from<ScalarVector, Rule, master, grad_format>(arrays, scalars, tail, end);
    end_stream<master>();
}

#include "traffic.h"

#include "dispatch.h"
