// From formats that are known at run time to functions: every instance of the templates, once. Included by body.h.

// `visitor` is called with the format as a type that carries it.
template <GradFormat format>
struct GradIs {
    static constexpr GradFormat value = format;
};

template <class Visitor>
static auto for_grad(GradFormat format, Visitor visitor) {
    switch (format) {
        case GradFormat::bf16: return visitor(GradIs<GradFormat::bf16>{});
        case GradFormat::fp16: return visitor(GradIs<GradFormat::fp16>{});
        default: return visitor(GradIs<GradFormat::fp32>{});
    }
}

template <MasterFormat format>
struct MasterIs {
    static constexpr MasterFormat value = format;
};

template <class Visitor>
static auto for_master(MasterFormat format, Visitor visitor) {
    switch (format) {
        case MasterFormat::split_bf16: return visitor(MasterIs<MasterFormat::split_bf16>{});
        case MasterFormat::fp32_out_bf16: return visitor(MasterIs<MasterFormat::fp32_out_bf16>{});
        case MasterFormat::fp32_out_fp16: return visitor(MasterIs<MasterFormat::fp32_out_fp16>{});
        default: return visitor(MasterIs<MasterFormat::fp32>{});
    }
}

template <template <class> class Rule>
static auto update_function(MasterFormat master, GradFormat grad) -> UpdateFunction<typename Rule<Vector>::Scalars> {
    return for_master(master, [grad](auto master_is) {
        return for_grad(grad, [](auto grad_is) -> UpdateFunction<typename Rule<Vector>::Scalars> {
            return update<Rule, decltype(master_is)::value, decltype(grad_is)::value>;
        });
    });
}

template <template <class> class Rule>
static TrafficFunction traffic_function(MasterFormat master, GradFormat grad) {
    return for_master(master, [grad](auto master_is) {
        return for_grad(grad, [](auto grad_is) -> TrafficFunction {
            return traffic<Rule, decltype(master_is)::value, decltype(grad_is)::value>;
        });
    });
}

static SquaresFunction squares_function(GradFormat grad) {
    return for_grad(grad, [](auto grad_is) -> SquaresFunction { return squares<decltype(grad_is)::value>; });
}

static ArrivalFunction arrival_function(GradFormat source, GradFormat grad) {
    return for_grad(source, [grad](auto source_is) {
        return for_grad(grad, [](auto grad_is) -> ArrivalFunction {
            return arrival<decltype(source_is)::value, decltype(grad_is)::value>;
        });
    });
}
