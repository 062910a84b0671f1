"""The binding of the native Adam: calls by address, on a thread team of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from infinity.errors import PlatformError
from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel_choice import KERNEL_VARIABLE, KernelChoice, allowed_cores, choose

try:
    from infinity import _cpu_adam
except ImportError as _error:  # not built here; `open_kernel` says so
    _NATIVE_ERROR: ImportError | None = _error
else:
    _NATIVE_ERROR = None

__all__ = [
    "BLOCK_ELEMENTS", "KERNEL_VARIABLE", "AdamArrays", "AdamKernel", "GradientRun", "MasterFormat",
    "SquareSums", "choose_kernel", "kernel_names", "kernel_requirements", "open_kernel",
]  # fmt: skip

BLOCK_ELEMENTS = 4096  # elements of a shard's state index space that share one partial sum of squares

_GRAD_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class MasterFormat(str, Enum):
    """How the fp32 master is kept."""

    FP32 = "fp32"  # the weights are the master
    SPLIT_BF16 = "split_bf16"  # the bf16 weights are its high half, `low` (int16) the rest
    FP32_OUT_BF16 = "fp32_out_bf16"  # the weights are the master; `out` receives them in bf16, rounded to nearest even
    FP32_OUT_FP16 = "fp32_out_fp16"  # likewise in fp16


@dataclass(frozen=True, slots=True)
class AdamArrays:
    """Addresses of the first elements. All arrays have one length and must stay alive during the call."""

    weights: int  # bf16 where split, else fp32; updated in place
    exp_avg: int  # fp32, updated in place
    exp_avg_sq: int  # fp32, updated in place
    grad: int
    low: int = 0  # int16, updated in place; where the master is split
    out: int = 0  # bf16 or fp16, written only


@dataclass(frozen=True, slots=True)
class GradientRun:
    """A run of a gradient that arrives: `length` elements of `dtype` at `address`, of which the first is element `start`."""

    start: int
    length: int
    address: int
    dtype: str  # "float32" | "bfloat16" | "float16"


@dataclass(frozen=True, slots=True)
class SquareSums:
    """The sums of squares of each 4,096 elements, fp64 [num_blocks], and whether every element is finite."""

    partials: NDArray[np.float64]
    finite: bool


class AdamKernel:
    """Adam and gradient statistics on one thread team. Any thread may call; calls take turns. The GIL is released.

    Results depend neither on the instruction set nor on the number of threads.
    """

    def __init__(self, native: _cpu_adam.CpuAdam, choice: KernelChoice) -> None:
        self._native = native
        self.choice = choice

    @property
    def name(self) -> str:
        """The instruction set in use."""
        return self._native.name

    @property
    def num_threads(self) -> int:
        return self._native.num_threads

    def adam_update(
        self,
        master: MasterFormat,
        grad_dtype: str,
        num_elements: int,
        arrays: AdamArrays,
        hyper: AdamHyper,
        coefficient: float = 1.0,
    ) -> None:
        """Make one Adam update of elements that share `hyper`; the gradient is multiplied by `coefficient` first."""
        scalars = _native_scalars(hyper, coefficient)
        self._native.update(_master(master), _grad_format(grad_dtype), num_elements, _native_arrays(arrays), scalars)

    def move_bytes(self, master: MasterFormat, grad_dtype: str, num_elements: int, arrays: AdamArrays) -> None:
        """Read and write what an update does, and change nothing: the bare loop that an update is measured against.

        `out` alone is written: it receives the high halves of the weights.
        """
        self._native.traffic(_master(master), _grad_format(grad_dtype), num_elements, _native_arrays(arrays), 0)

    def gradient_statistics(self, address: int, num_elements: int, grad_dtype: str) -> SquareSums:
        """Return the fp64 sums of squares per 4,096 elements of the gradient at `address`."""
        partials = np.empty(-(-num_elements // BLOCK_ELEMENTS), dtype=np.float64)
        finite = self._native.sums_of_squares(
            _grad_format(grad_dtype), num_elements, grad=address, sums=partials.ctypes.data
        )
        return SquareSums(partials, finite)

    def round_gradient(self, runs: Sequence[GradientRun], address: int, num_elements: int, grad_dtype: str) -> SquareSums:
        """Round a gradient into its place at `address` and return its statistics, in one pass; zero where no run is.

        `runs` ascend and do not overlap. A source may begin where the gradient does, of which it then fills the front.
        The result is that of rounding first and `gradient_statistics` then.
        """
        partials = np.empty(-(-num_elements // BLOCK_ELEMENTS), dtype=np.float64)
        native = [_cpu_adam.Run(run.start, run.length, run.address, _grad_format(run.dtype)) for run in runs]
        finite = self._native.arrive(native, _grad_format(grad_dtype), num_elements, grad=address, sums=partials.ctypes.data)
        return SquareSums(partials, finite)


def kernel_names() -> tuple[str, ...]:
    """Return the instruction sets that this CPU can run, the fastest first. Raises PlatformError where none is built."""
    _require_native()
    return tuple(_cpu_adam.names())


def kernel_requirements() -> dict[str, tuple[str, ...]]:
    """Return the CPU features that each instruction set needs, by the names of /proc/cpuinfo. Raises like kernel_names."""
    _require_native()
    return {name: tuple(features.split()) for name, features in _cpu_adam.requirements().items()}


def choose_kernel(*, num_threads: int | None = None, environment: Mapping[str, str] = os.environ) -> KernelChoice:
    """Return what `open_kernel` would open: the fastest kernel of this CPU or the one that INFINITY_CPU_ADAM names.

    `num_threads` is by default INFINITY_ADAM_THREADS, else this rank's share of the cores that the process may use.
    Raises PlatformError without the native module, ConfigError for an unknown name or a count below 1.
    """
    return choose(kernel_names(), num_cores=allowed_cores(), num_threads=num_threads, environment=environment)


def open_kernel(*, num_threads: int | None = None, environment: Mapping[str, str] = os.environ) -> AdamKernel:
    """Return the kernel that `choose_kernel` chooses, with its own thread team. Raises as that does."""
    choice = choose_kernel(num_threads=num_threads, environment=environment)
    native = _cpu_adam.CpuAdam(
        choice.name, num_threads=choice.num_threads, share_index=choice.share_index, num_shares=choice.num_shares
    )
    return AdamKernel(native, choice)


@lru_cache(maxsize=256)
def _native_scalars(hyper: AdamHyper, coefficient: float) -> _cpu_adam.AdamScalars:
    scalars = hyper.scalars()
    return _cpu_adam.AdamScalars(
        coefficient=coefficient,
        decay=scalars.decay,
        l2=scalars.l2,
        beta2=scalars.beta2,
        lerp_weight=scalars.lerp_weight,
        square_weight=scalars.square_weight,
        root_correction=scalars.root_correction,
        eps=scalars.eps,
        step_size=scalars.step_size,
    )


def _native_arrays(arrays: AdamArrays) -> _cpu_adam.Arrays:
    return _cpu_adam.Arrays(
        weights=arrays.weights, low=arrays.low, out=arrays.out, states=(arrays.exp_avg, arrays.exp_avg_sq), grad=arrays.grad
    )


def _master(master: MasterFormat) -> _cpu_adam.MasterFormat:
    return _cpu_adam.MasterFormat.__members__[master.value]


def _grad_format(grad_dtype: str) -> _cpu_adam.GradFormat:
    return _cpu_adam.GradFormat.__members__[_GRAD_FORMATS[grad_dtype]]


def _require_native() -> None:
    if _NATIVE_ERROR is not None:
        raise PlatformError(
            f"The native module infinity._cpu_adam is missing: {_NATIVE_ERROR}.",
            remedy="Build it with a C++17 compiler: pip install --no-build-isolation -e .",
        ) from _NATIVE_ERROR
