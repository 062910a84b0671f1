"""The binding of the native Adam: which instruction set, how many threads, and calls by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from infinity.errors import ConfigError, PlatformError
from infinity.optim.hyper import AdamHyper

try:
    from infinity import _cpu_adam
except ImportError as _error:  # not built here; `open_kernel` says so
    _NATIVE_ERROR: ImportError | None = _error
else:
    _NATIVE_ERROR = None

KERNEL_VARIABLE = "INFINITY_CPU_ADAM"
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
class SquareSums:
    """The sums of squares of each 4,096 elements, fp64 [num_blocks], and whether every element is finite."""

    partials: NDArray[np.float64]
    finite: bool


class AdamKernel:
    """Adam and gradient statistics on one thread team. Any thread may call; calls take turns. The GIL is released.

    Results depend neither on the instruction set nor on the number of threads.
    """

    def __init__(self, native: _cpu_adam.CpuAdam) -> None:
        self._native = native

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
        scalars = hyper.scalars()
        self._native.update(
            _cpu_adam.MasterFormat.__members__[master.value],
            _grad_format(grad_dtype),
            num_elements,
            weights=arrays.weights,
            low=arrays.low,
            out=arrays.out,
            exp_avg=arrays.exp_avg,
            exp_avg_sq=arrays.exp_avg_sq,
            grad=arrays.grad,
            scalars=_cpu_adam.Scalars(
                coefficient=coefficient,
                decay=scalars.decay,
                l2=scalars.l2,
                beta2=scalars.beta2,
                lerp_weight=scalars.lerp_weight,
                square_weight=scalars.square_weight,
                root_correction=scalars.root_correction,
                eps=scalars.eps,
                step_size=scalars.step_size,
            ),
        )

    def gradient_statistics(self, address: int, num_elements: int, grad_dtype: str) -> SquareSums:
        """Return the fp64 sums of squares per 4,096 elements of the gradient at `address`."""
        partials = np.empty(-(-num_elements // BLOCK_ELEMENTS), dtype=np.float64)
        finite = self._native.sums_of_squares(
            _grad_format(grad_dtype), num_elements, grad=address, sums=partials.ctypes.data
        )
        return SquareSums(partials, finite)


def kernel_names() -> tuple[str, ...]:
    """Return the instruction sets that this CPU can run, the fastest first. Raises PlatformError where none is built."""
    _require_native()
    return tuple(_cpu_adam.names())


def open_kernel(*, num_threads: int | None = None, environment: Mapping[str, str] = os.environ) -> AdamKernel:
    """Return the fastest kernel of this CPU, or the one that INFINITY_CPU_ADAM names, with its own thread team.

    `num_threads` is by default the number of cores that this process may use.
    Raises PlatformError without the native module, ConfigError for an unknown name or a count below 1.
    """
    names = kernel_names()
    name = environment.get(KERNEL_VARIABLE) or names[0]
    if name not in names:
        raise ConfigError(
            f"{KERNEL_VARIABLE}={name!r}: this CPU has no such Adam kernel.", remedy=f"Choose one of {', '.join(names)}."
        )
    count = allowed_cores() if num_threads is None else num_threads
    if count < 1:
        raise ConfigError(f"Adam threads: {count} is too few.", remedy="Give 1 or more.")
    return AdamKernel(_cpu_adam.CpuAdam(name, count))


def allowed_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _grad_format(grad_dtype: str) -> _cpu_adam.GradFormat:
    return _cpu_adam.GradFormat.__members__[_GRAD_FORMATS[grad_dtype]]


def _require_native() -> None:
    if _NATIVE_ERROR is not None:
        raise PlatformError(
            f"The native module infinity._cpu_adam is missing: {_NATIVE_ERROR}.",
            remedy="Build it with a C++17 compiler: pip install --no-build-isolation -e .",
        ) from _NATIVE_ERROR
