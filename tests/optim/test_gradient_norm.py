"""The global norm is the same for every kernel and thread count, right to fp64, and clips as torch does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from infinity.optim.grad_norm import clip_coefficient, combine_partials, global_norm
from infinity.optim.kernel import BLOCK_ELEMENTS, AdamKernel, GradientRun, kernel_names, open_kernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gradient(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-12, 6, (numel,), generator=generator)).to(dtype)


def sum_of_squares(kernel: AdamKernel, grad: torch.Tensor, dtype: str) -> float:
    return combine_partials(kernel.gradient_statistics(grad.data_ptr(), grad.numel(), dtype).partials)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 64, 4095, 4096, 4097, 100_003])
def test_partials_have_the_same_bits_everywhere(dtype: str, numel: int) -> None:
    """Every kernel with one thread and with four gives the scalar partials, which are right to fp64 rounding."""
    grad = gradient(numel, DTYPES[dtype])
    expected = None
    for name in kernel_names():
        for num_threads in (1, 4):
            kernel = open_kernel(num_threads=num_threads, environment={"INFINITY_CPU_ADAM": name})
            statistics = kernel.gradient_statistics(grad.data_ptr(), numel, dtype)
            expected = statistics.partials if expected is None else expected
            assert np.array_equal(statistics.partials.view(np.int64), expected.view(np.int64))
            assert statistics.finite
    assert expected is not None
    for block, partial in enumerate(expected):
        exact = math.fsum(
            value * value for value in grad[block * BLOCK_ELEMENTS : (block + 1) * BLOCK_ELEMENTS].double().tolist()
        )
        assert partial == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(name: str, dtype: str, bad: float) -> None:
    """In a vector part, in the tail, in the last block: finite is False and the norm says so."""
    kernel = open_kernel(environment={"INFINITY_CPU_ADAM": name}, num_threads=2)
    for position in (0, 4100, 9000, 9001):
        grad = gradient(9002, DTYPES[dtype])
        grad[position] = bad
        assert not kernel.gradient_statistics(grad.data_ptr(), 9002, dtype).finite
        assert not math.isfinite(global_norm([sum_of_squares(kernel, grad, dtype), 1.0]))


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_one_pass_rounds_and_measures_as_two_do(name: str, dtype: str, source_dtype: str) -> None:
    """Rounding a gradient into its place gives torch's values, zeros between the runs, and the partials of a second pass."""
    numel, pieces = 100_003, ((0, 4096), (4100, 777), (5000, 1), (5056, 30_000), (80_000, 20_003))
    values = [gradient(length, DTYPES[source_dtype], seed=start) for start, length in pieces]
    expected = torch.zeros(numel, dtype=DTYPES[dtype])
    for (start, length), value in zip(pieces, values, strict=True):
        expected[start : start + length] = value.to(DTYPES[dtype])
    for num_threads in (1, 2):
        kernel = open_kernel(num_threads=num_threads, environment={"INFINITY_CPU_ADAM": name})
        got = torch.full((numel,), math.nan, dtype=DTYPES[dtype])
        runs = [
            GradientRun(start, length, value.data_ptr(), source_dtype)
            for (start, length), value in zip(pieces, values, strict=True)
        ]
        sums = kernel.round_gradient(runs, got.data_ptr(), numel, dtype)
        two = kernel.gradient_statistics(expected.data_ptr(), numel, dtype)
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        assert np.array_equal(sums.partials.view(np.int64), two.partials.view(np.int64))
        assert sums.finite
        values[3][29_999] = math.inf
        assert not kernel.round_gradient(runs, got.data_ptr(), numel, dtype).finite
        values[3][29_999] = expected[5056 + 29_999]


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_total_is_rounded_into_its_own_front(name: str, dtype: str) -> None:
    """An fp32 total whose memory the finished gradient takes over is read before it is overwritten."""
    kernel = open_kernel(environment={"INFINITY_CPU_ADAM": name})
    total = gradient(200_001, torch.float32)
    expected = total.to(DTYPES[dtype])
    sums = kernel.round_gradient(
        [GradientRun(0, total.numel(), total.data_ptr(), "float32")], total.data_ptr(), total.numel(), dtype
    )
    got = total.view(torch.uint8)[: expected.numel() * expected.element_size()]
    assert torch.equal(got, expected.view(torch.uint8))
    two = kernel.gradient_statistics(expected.data_ptr(), expected.numel(), dtype)
    assert np.array_equal(sums.partials.view(np.int64), two.partials.view(np.int64))


def test_the_largest_gradients_do_not_overflow() -> None:
    """The norm of the largest finite fp32 values is finite, where a sum in fp32 would not be."""
    grad = torch.full((5000,), torch.finfo(torch.float32).max)
    statistics = open_kernel().gradient_statistics(grad.data_ptr(), 5000, "float32")
    assert statistics.finite
    assert global_norm([combine_partials(statistics.partials)]) == pytest.approx(3.4028234663852886e38 * math.sqrt(5000))


def test_partials_are_combined_in_a_fixed_tree() -> None:
    """Neighbours first and an odd one carried: the order that a plain loop would not give."""
    values = [1.0, 2.0**-53, 2.0**-53, 1.0, 2.0**-53]
    assert combine_partials(values) == ((1.0 + 2.0**-53) + (2.0**-53 + 1.0)) + 2.0**-53
    assert combine_partials([]) == 0.0
    assert combine_partials(np.array([3.0])) == 3.0


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
def test_clipping_is_that_of_torch(max_norm: float) -> None:
    """Norm and scaled gradients of torch.nn.utils.clip_grad_norm_ over several parameters, to fp32 rounding."""
    grads = [gradient(numel, torch.float32, seed=numel) for numel in (100, 5000, 12_345)]
    kernel = open_kernel()
    norm = global_norm([sum_of_squares(kernel, grad, "float32") for grad in grads])
    parameters = [torch.nn.Parameter(torch.zeros(grad.numel())) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    coefficient = clip_coefficient(norm, max_norm)
    assert coefficient <= 1.0
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(grad * coefficient, parameter.grad, rtol=1e-6, atol=0)


def test_clip_coefficient_keeps_nan() -> None:
    """A norm that is not a number is not clipped to 1."""
    assert math.isnan(clip_coefficient(math.nan, 1.0))
    assert clip_coefficient(math.inf, 1.0) == 0.0
