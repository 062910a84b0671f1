// Sums of squares of gradients, by themselves or in the pass that rounds a gradient into its place. Included by body.h.

// Values that are there already.
template <GradFormat format>
struct Stored {
    const void* grad;

    template <class V>
    typename V::Float at(std::size_t index) const {
        return load_grad<V>(grad, index, format);
    }
};

// Values that are rounded to where they stay, and read back as what they are now.
template <GradFormat source_format, GradFormat format>
struct Arriving {
    const void* source;
    void* grad;
    std::size_t begin;  // where source[0] goes

    template <class V>
    typename V::Float at(std::size_t index) const {
        store_grad<V>(grad, index, load_grad<V>(source, index - begin, source_format), format);
        return load_grad<V>(grad, index, format);
    }
};

// One by one: what stands before or after whole rows of lanes.
template <class Values>
static inline void add_square(const Values& values, std::size_t index, double* lanes) {
    double& lane = lanes[index % kLanes];
    lane = ScalarVector::add_square(lane, static_cast<double>(values.template at<ScalarVector>(index)));
}

// Every lane takes its elements in ascending order.
template <class Values>
static inline void add_squares(const Values& values, std::size_t begin, std::size_t end, double* lanes) {
    constexpr std::size_t parts = Vector::width / Vector::double_width;
    std::size_t index = begin;
    for (; index < end && index % kLanes != 0; ++index) add_square(values, index, lanes);
    typename Vector::Double sums[kLanes / Vector::double_width];
    for (std::size_t part = 0; part < kLanes / Vector::double_width; ++part) {
        sums[part] = Vector::load_double(lanes + part * Vector::double_width);
    }
    for (; index + kLanes <= end; index += kLanes) {
        for (std::size_t piece = 0; piece < kLanes / Vector::width; ++piece) {
            const auto floats = values.template at<Vector>(index + piece * Vector::width);
            for (std::size_t part = 0; part < parts; ++part) {
                auto& sum = sums[piece * parts + part];
                sum = Vector::add_square(sum, Vector::to_double(floats, part));
            }
        }
    }
    for (std::size_t part = 0; part < kLanes / Vector::double_width; ++part) {
        Vector::store_double(lanes + part * Vector::double_width, sums[part]);
    }
    for (; index < end; ++index) add_square(values, index, lanes);
}

template <GradFormat format>
static void squares(const void* grad, std::size_t begin, std::size_t end, double* lanes) {
    add_squares(Stored<format>{grad}, begin, end, lanes);
}

template <GradFormat source_format, GradFormat format>
static void arrival(const void* source, void* grad, std::size_t begin, std::size_t end, double* lanes) {
    add_squares(Arriving<source_format, format>{source, grad, begin}, begin, end, lanes);
}
