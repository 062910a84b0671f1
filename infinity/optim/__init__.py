"""Adam on host memory, the stream that updates tile by tile, the gradient norm, and learning-rate schedules."""
