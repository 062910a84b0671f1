// Adam and AdamW as an update rule: the planes of state it has, and its step for one vector. Included by body.h.
//
// The order of operations is that of torch's single-tensor Adam: docs/numerics.md. Another optimizer is another such class,
// its scalars in kernel.h and its functions in the table there; loading, splitting, rounding and storing are body.h's.
template <class V>
class Adam {
public:
    using Float = typename V::Float;
    using Scalars = AdamScalars;
    static constexpr StateFormat states[] = {StateFormat::fp32, StateFormat::fp32};  // exp_avg, exp_avg_sq
    static constexpr std::size_t num_states = sizeof states / sizeof states[0];

    explicit Adam(const Scalars& scalars)
        // Interpolates from the nearer end, as torch.lerp does: from the moment for a weight below a half, else from the
        // gradient.
        : from_moment_(scalars.lerp_weight < 0.5f),
          coupled_(scalars.l2 != 0.0f),
          coefficient_(V::set(scalars.coefficient)),
          decay_(V::set(scalars.decay)),
          l2_(V::set(scalars.l2)),
          beta2_(V::set(scalars.beta2)),
          lerp_weight_(V::set(from_moment_ ? scalars.lerp_weight : scalars.lerp_weight - 1.0f)),
          square_weight_(V::set(scalars.square_weight)),
          root_correction_(V::set(scalars.root_correction)),
          eps_(V::set(scalars.eps)),
          step_size_(V::set(scalars.step_size)) {}

    // Returns the new weight and changes the state.
    Float step(Float grad, Float weight, Float (&state)[num_states]) const {
        auto& [moment, square] = state;
        grad = V::mul(grad, coefficient_);
        weight = V::mul(weight, decay_);
        if (coupled_) grad = V::add(grad, V::mul(l2_, weight));

        const auto change = V::mul(lerp_weight_, V::sub(grad, moment));
        moment = V::add(from_moment_ ? moment : grad, change);
        square = V::add(V::mul(square, beta2_), V::mul(V::mul(square_weight_, grad), grad));

        const auto denominator = V::add(V::div(V::sqrt(square), root_correction_), eps_);
        return V::add(weight, V::div(V::mul(step_size_, moment), denominator));
    }

private:
    const bool from_moment_, coupled_;
    const Float coefficient_, decay_, l2_, beta2_, lerp_weight_, square_weight_, root_correction_, eps_, step_size_;
};
