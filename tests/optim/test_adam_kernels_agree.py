"""Every instruction set, thread count and split of the work gives the bits of the scalar kernel and of the reference."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel import KERNEL_VARIABLE, AdamArrays, AdamKernel, MasterFormat, kernel_names, open_kernel
from infinity.optim.kernel_choice import allowed_cores
from infinity.optim.reference import adam_update_, join_master, split_master

HYPER = AdamHyper(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
GRAD_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x807FFFFF, 0x33800000, 0x3F800000, 0xBF800000,
    0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x5F000000,
    0x1F000000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x3F808000, 0x3F818000, 0x3F807FFF,
]  # fmt: skip


def kernel(name: str, num_threads: int = 1) -> AdamKernel:
    return open_kernel(num_threads=num_threads, environment={KERNEL_VARIABLE: name})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers; every NaN counts as one, because which of two NaNs an addition returns is not defined."""
    integers = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    view = tensor.clone().view(integers)
    return torch.where(tensor.isnan(), -1, view) if tensor.is_floating_point() else view


def special_floats() -> torch.Tensor:
    signed = [value - (1 << 32) if value >= 1 << 31 else value for value in SPECIAL_BITS]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def make_arrays(grad_dtype: torch.dtype, numel: int = 5003) -> dict[str, torch.Tensor]:
    """Random numbers over many magnitudes, any bit patterns at all, then every pair of a special weight and gradient."""
    generator = torch.Generator().manual_seed(7)

    def wide() -> torch.Tensor:
        return torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-140, 40, (numel,), generator=generator)

    def any_bits() -> torch.Tensor:
        words = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator, dtype=torch.int64)
        return words.to(torch.int32).view(torch.float32)

    special = special_floats()
    weights, grads = torch.cartesian_prod(special, special).unbind(1)
    return {
        "master": torch.cat([wide(), any_bits(), weights]),
        "exp_avg": torch.cat([wide(), any_bits(), weights.flip(0)]),
        "exp_avg_sq": torch.cat([wide().square(), any_bits().abs(), grads.roll(5).abs()]),
        "grad": torch.cat([wide(), any_bits(), grads]).to(grad_dtype),
    }


def run(
    one: AdamKernel, master: MasterFormat, arrays: dict[str, torch.Tensor], hyper: AdamHyper, *,
    piece: int | None = None, shift: int = 0, order: int = 1,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update copies of the arrays and return everything that was written.

    `piece` elements a call, from the front (`order` 1) or from the back (-1); `shift` elements past an aligned address.
    """
    numel = arrays["master"].numel()
    out_dtype = torch.float16 if master is MasterFormat.FP32_OUT_FP16 else torch.bfloat16

    def place(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:1].expand(shift), values])[shift:]

    written = {
        "weights": place(arrays["master"]), "low": place(torch.zeros(numel, dtype=torch.int16)),
        "out": place(torch.zeros(numel, dtype=out_dtype)), "exp_avg": place(arrays["exp_avg"]),
        "exp_avg_sq": place(arrays["exp_avg_sq"]),
    }  # fmt: skip
    if master is MasterFormat.SPLIT_BF16:
        written["weights"], written["low"] = map(place, split_master(arrays["master"]))
    tensors = {**written, "grad": place(arrays["grad"])}
    for begin in range(0, numel, piece or numel)[::order]:
        addresses = {name: tensor.data_ptr() + begin * tensor.element_size() for name, tensor in tensors.items()}
        grad_dtype = str(arrays["grad"].dtype).removeprefix("torch.")
        length = min(piece or numel, numel - begin)
        one.adam_update(master, grad_dtype, length, AdamArrays(**addresses), hyper, coefficient=0.37)
    return written


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in expected:
        different = (bits(got[name]) != bits(expected[name])).nonzero().flatten()
        assert different.numel() == 0, f"{name}: {different.numel()} elements differ, the first is {different[0]}"


@pytest.mark.parametrize("name", [name for name in kernel_names() if name != "scalar"])
@pytest.mark.parametrize("master", list(MasterFormat))
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_vector_kernel_equals_scalar_kernel(name: str, master: MasterFormat, grad_dtype: str) -> None:
    """Subnormal, negative zero, huge, infinite and NaN inputs included (C52)."""
    arrays = make_arrays(GRAD_DTYPES[grad_dtype])
    for beta1, decoupled in itertools.product((0.9, 0.3), (True, False)):
        hyper = replace(HYPER, beta1=beta1, decoupled=decoupled)
        assert_same_bits(run(kernel(name), master, arrays, hyper), run(kernel("scalar"), master, arrays, hyper))


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_kernel_equals_the_reference(name: str, grad_dtype: str, decoupled: bool) -> None:
    """The reference in torch operations has the same bits, for a master in fp32 and for a split one."""
    hyper = replace(HYPER, decoupled=decoupled)
    arrays = make_arrays(GRAD_DTYPES[grad_dtype])
    for master in (MasterFormat.FP32, MasterFormat.SPLIT_BF16):
        high, low = split_master(arrays["master"])
        start = join_master(high, low) if master is MasterFormat.SPLIT_BF16 else arrays["master"].clone()
        expected = {"weights": start, "exp_avg": arrays["exp_avg"].clone(), "exp_avg_sq": arrays["exp_avg_sq"].clone()}
        adam_update_(*expected.values(), arrays["grad"], hyper, 0.37)
        if master is MasterFormat.SPLIT_BF16:
            expected["weights"], expected["low"] = split_master(expected["weights"])
        assert_same_bits(run(kernel(name), master, arrays, hyper), expected)


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("master", [MasterFormat.FP32_OUT_BF16, MasterFormat.FP32_OUT_FP16])
def test_separate_weights_are_the_rounded_master(name: str, master: MasterFormat) -> None:
    """The low-precision stream is torch's conversion of the new master, whatever its alignment (C54)."""
    arrays = make_arrays(torch.float32)
    for skipped in range(3):
        shifted = {key: tensor[skipped:] for key, tensor in arrays.items()}
        written = run(kernel(name), master, shifted, HYPER)
        assert_same_bits({"out": written["out"]}, {"out": written["weights"].to(written["out"].dtype)})


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("master", list(MasterFormat))
def test_results_do_not_depend_on_threads_or_pieces(name: str, master: MasterFormat) -> None:
    """Every number of threads, one call or many of odd lengths, from either end, at odd addresses: the same bits."""
    arrays = make_arrays(torch.bfloat16, numel=50_001)
    expected = run(kernel(name), master, arrays, HYPER)
    for num_threads in range(1, allowed_cores() + 1):
        assert_same_bits(run(kernel(name, num_threads), master, arrays, HYPER, shift=num_threads), expected)
    several = kernel(name, allowed_cores())
    for piece, shift, order in ((64, 0, -1), (1000, 3, 1), (4097, 1, -1), (32768, 2, -1), (65537, 5, 1)):
        assert_same_bits(run(several, master, arrays, HYPER, piece=piece, shift=shift, order=order), expected)


@pytest.mark.parametrize("name", kernel_names())
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
def test_the_bare_loop_leaves_every_bit(name: str, grad_dtype: str) -> None:
    """What an update is measured against changes no array; `out` gets the high halves of the weights that are there."""
    arrays = make_arrays(GRAD_DTYPES[grad_dtype], numel=70_001)
    high, low = split_master(arrays["master"])
    for master in MasterFormat:
        given = {
            "weights": high if master is MasterFormat.SPLIT_BF16 else arrays["master"], "low": low,
            "exp_avg": arrays["exp_avg"], "exp_avg_sq": arrays["exp_avg_sq"], "grad": arrays["grad"],
        }  # fmt: skip
        tensors = {key: tensor.clone() for key, tensor in given.items()}
        out = torch.zeros(arrays["grad"].numel(), dtype=torch.int16)
        addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
        kernel(name, 2).move_bytes(master, grad_dtype, out.numel(), AdamArrays(**addresses, out=out.data_ptr()))
        for key, tensor in tensors.items():
            assert torch.equal(tensor.view(torch.uint8), given[key].view(torch.uint8)), key
        if master in (MasterFormat.FP32_OUT_BF16, MasterFormat.FP32_OUT_FP16):
            assert torch.equal(out, (arrays["master"].view(torch.int32) >> 16).to(torch.int16))


def test_subnormals_are_kept_whatever_the_caller_has_set() -> None:
    """torch.set_flush_denormal of the calling thread does not reach the kernel, and is as before afterwards."""
    arrays = make_arrays(torch.float32)
    expected = run(kernel("scalar"), MasterFormat.FP32, arrays, HYPER)
    tiny = torch.tensor([1e-40])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        got = {name: run(kernel(name, 2), MasterFormat.FP32, arrays, HYPER) for name in kernel_names()}
        flushed = (tiny * 1.0).item()
    finally:
        torch.set_flush_denormal(False)
    assert flushed == 0.0
    for result in got.values():
        assert_same_bits(result, expected)


FORK = """
import os
import numpy as np
from infinity.optim.kernel import open_kernel
kernel = open_kernel(num_threads=4, environment={})
values = np.ones(1_000_000, dtype=np.float32)
child = os.fork()
total = kernel.gradient_statistics(values.ctypes.data, values.size, "float32").partials.sum()
del kernel
if child == 0:
    os._exit(0 if total == values.size else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or int(total != values.size))
"""


def test_a_forked_process_computes_without_the_threads_that_it_lacks() -> None:
    """Neither a call nor the end of the kernel hangs in a child made by fork, as data loaders make them."""
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode == 0


def test_callers_on_several_threads_take_turns() -> None:
    """Eight threads on one kernel get the results of one."""
    arrays = make_arrays(torch.bfloat16, numel=100_000)
    one = kernel(kernel_names()[0], num_threads=3)
    expected = run(one, MasterFormat.SPLIT_BF16, arrays, HYPER)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: run(one, MasterFormat.SPLIT_BF16, arrays, HYPER), range(16)))
    for result in results:
        assert_same_bits(result, expected)
