"""bf16 weights and 16 stored bits are the fp32 master, bit for bit, and the weights are the master rounded half up."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel import AdamArrays, MasterFormat, kernel_names, open_kernel
from infinity.optim.reference import join_master, split_master

MAGNITUDE, INFINITY, QUIET_NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
LARGEST = 0x7F7F7FFF  # of the masters that round to a finite bf16


def half_up(master: torch.Tensor) -> torch.Tensor:
    """An independent rounding: the nearer bf16 by distance in fp64, ties away from zero, at most the largest finite."""
    truncated = (master.view(torch.int32) & -65536).view(torch.float32).double()
    exponent = torch.frexp(master.double())[1].clamp(min=-125)
    spacing = torch.ldexp(torch.ones_like(truncated), exponent - 8)
    away = (master.double().abs() - truncated.abs()) * 2 >= spacing
    rounded = truncated.abs() + torch.where(away, spacing, 0.0)
    limit = torch.finfo(torch.bfloat16).max
    return (rounded.clamp(max=limit) * torch.where(master.signbit(), -1.0, 1.0)).to(torch.bfloat16)


def assert_splits(bits: torch.Tensor) -> None:
    """The bits come back, except for what is clamped and for NaN; weights are finite where the master is."""
    high, low = split_master(bits.view(torch.float32))
    sign, magnitude = bits & ~MAGNITUDE, bits & MAGNITUDE
    expected = torch.where((magnitude > LARGEST) & (magnitude < INFINITY), sign | LARGEST, bits)
    expected = torch.where(magnitude > INFINITY, sign | QUIET_NAN, expected)
    assert torch.equal(join_master(high, low).view(torch.int32), expected)
    exponent_is_full = (high.view(torch.int16) & 0x7F80) == 0x7F80
    assert torch.equal(exponent_is_full, magnitude >= INFINITY)


def test_split_is_a_bijection_on_samples() -> None:
    """Every exponent and sign with the mantissas around each rounding edge, and a million random patterns."""
    exponents = torch.arange(512, dtype=torch.int64).reshape(-1, 1) << 23
    edges = torch.tensor(
        [0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x7F7FFF, 0x7F8000, 0x7FFFFF]
    )
    generator = torch.Generator().manual_seed(3)
    random = torch.randint(0, 1 << 32, (1_000_000,), generator=generator)
    bits = torch.cat([(exponents + edges).flatten(), random]).to(torch.int32)
    assert_splits(bits)
    master = bits.view(torch.float32)
    master = master[master.isfinite()]
    assert torch.equal(split_master(master)[0].view(torch.int16), half_up(master).view(torch.int16))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_split_is_a_bijection_on_all_patterns() -> None:
    """All 2^32 patterns."""
    chunk = 1 << 22  # the temporaries stay in the cache
    for start in range(0, 1 << 32, chunk):
        assert_splits(torch.arange(start, start + chunk).to(torch.int32))


@pytest.mark.parametrize("name", kernel_names())
def test_weights_are_the_rounded_master_after_every_step(name: str) -> None:
    """Two parameters of equal size and one odd one, two steps: bf16 weights == half-up(master) for each (C54)."""
    kernel = open_kernel(environment={"INFINITY_CPU_ADAM": name})
    generator = torch.Generator().manual_seed(11)
    for numel in (4096, 4096, 1003):
        full = torch.randn(numel, generator=generator)
        full_moments = torch.zeros(numel), torch.zeros(numel)
        high, low = split_master(full)
        moments = torch.zeros(numel), torch.zeros(numel)
        for step in (1, 2):
            hyper = AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.1, step, decoupled=True)
            grad = torch.randn(numel, generator=generator).bfloat16()
            split = AdamArrays(
                high.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), grad.data_ptr(), low.data_ptr()
            )
            plain = AdamArrays(full.data_ptr(), full_moments[0].data_ptr(), full_moments[1].data_ptr(), grad.data_ptr())
            kernel.adam_update(MasterFormat.SPLIT_BF16, "bfloat16", numel, split, hyper)
            kernel.adam_update(MasterFormat.FP32, "bfloat16", numel, plain, hyper)
            assert torch.equal(join_master(high, low), full)
            assert torch.equal(high, half_up(full))


@pytest.mark.parametrize("name", kernel_names())
def test_a_master_that_would_become_infinite_is_clamped(name: str) -> None:
    """The largest finite bf16 stays finite, in both signs, and the next update starts from the clamped value."""
    kernel = open_kernel(environment={"INFINITY_CPU_ADAM": name})
    start = torch.tensor([3.39e38, -3.39e38] * 20)
    high, low = split_master(start)
    moments, grad = (torch.zeros(40), torch.zeros(40)), torch.tensor([-1.0, 1.0] * 20)
    hyper = AdamHyper(1e36, 0.9, 0.999, 1e-8, 0.0, 1, decoupled=True)
    arrays = AdamArrays(high.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), grad.data_ptr(), low.data_ptr())
    kernel.adam_update(MasterFormat.SPLIT_BF16, "float32", 40, arrays, hyper)
    limit = torch.finfo(torch.bfloat16).max
    assert torch.equal(high.float(), torch.tensor([limit, -limit] * 20))
    assert bool((join_master(high, low).view(torch.int32) & 0x7FFFFFFF == LARGEST).all())
