"""Every instruction set, thread count and split of the work gives the bits of the scalar kernel and of the reference."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from infinity.errors import ConfigError
from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel import KERNEL_VARIABLE, AdamArrays, AdamKernel, MasterFormat, kernel_names, open_kernel
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
    """Random numbers over many magnitudes, then every pair of a special weight and a special gradient."""
    generator = torch.Generator().manual_seed(7)

    def wide() -> torch.Tensor:
        return torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-140, 40, (numel,), generator=generator)

    special = special_floats()
    weights, grads = torch.cartesian_prod(special, special).unbind(1)
    return {
        "master": torch.cat([wide(), weights]),
        "exp_avg": torch.cat([wide(), weights.flip(0)]),
        "exp_avg_sq": torch.cat([wide().square(), grads.roll(5).abs()]),
        "grad": torch.cat([wide(), grads]).to(grad_dtype),
    }


def run(
    one: AdamKernel, master: MasterFormat, arrays: dict[str, torch.Tensor], hyper: AdamHyper, *, piece: int | None = None
) -> dict[str, torch.Tensor]:
    """Update copies of the arrays, `piece` elements a call, and return everything that was written."""
    numel = arrays["master"].numel()
    out_dtype = torch.float16 if master is MasterFormat.FP32_OUT_FP16 else torch.bfloat16
    written = {
        "weights": arrays["master"].clone(), "low": torch.zeros(numel, dtype=torch.int16),
        "out": torch.zeros(numel, dtype=out_dtype), "exp_avg": arrays["exp_avg"].clone(),
        "exp_avg_sq": arrays["exp_avg_sq"].clone(),
    }  # fmt: skip
    if master is MasterFormat.SPLIT_BF16:
        written["weights"], written["low"] = split_master(arrays["master"])
    tensors = {**written, "grad": arrays["grad"]}
    for begin in range(0, numel, piece or numel):
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
def test_results_do_not_depend_on_threads_or_pieces(name: str) -> None:
    """One thread or five, one call or many of any length: the same bits."""
    arrays = make_arrays(torch.bfloat16, numel=150_001)
    expected = run(kernel(name), MasterFormat.SPLIT_BF16, arrays, HYPER)
    assert_same_bits(run(kernel(name, num_threads=5), MasterFormat.SPLIT_BF16, arrays, HYPER), expected)
    for piece in (64, 1000, 32768, 65537):
        assert_same_bits(run(kernel(name, 2), MasterFormat.SPLIT_BF16, arrays, HYPER, piece=piece), expected)


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


def test_kernel_is_chosen_by_name() -> None:
    """Every kernel that this CPU can run may be forced; the scalar one is always there; another name is refused (C52)."""
    assert kernel_names()[-1] == "scalar"
    assert [kernel(name).name for name in kernel_names()] == list(kernel_names())
    assert open_kernel(environment={}).name == kernel_names()[0]
    with pytest.raises(ConfigError, match=r"'sse9'.*scalar"):
        kernel("sse9")


def test_thread_count_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS=1, which launchers export, does not shrink the team; a count is taken, one below 1 refused (C51)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 5})
    assert open_kernel(environment={}).num_threads == 3
    assert open_kernel(environment={}, num_threads=2).num_threads == 2
    with pytest.raises(ConfigError, match="0"):
        open_kernel(num_threads=0)


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
