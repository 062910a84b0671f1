"""The Adam benchmark: what is asked for, what is measured in turn with what, and what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import torch

from infinity.bench.adam_contenders import LIMIT, TORCH_FUSED, limit, ours, torch_adamw
from infinity.bench.adam_data import AdamData, open_adam_data_arena
from infinity.bench.adam_paths import PATHS, AdamPath
from infinity.bench.caches import last_level_cache_bytes
from infinity.bench.rounds import Contender, Timings, time_in_turn
from infinity.byte_sizes import format_bytes, round_up
from infinity.errors import ConfigError, DoesNotFit
from infinity.memory.limits import HostLimit, host_limit_bytes
from infinity.optim.kernel import KERNEL_VARIABLE, AdamKernel, MasterFormat, kernel_names, open_kernel

ALL = "all"
_DEFAULT_PARAMETERS = 200_000_000
_GRANULE = 1 << 12  # parameters; every stream then starts at a page
_SPARE_SHARE = 0.9  # of the memory that is free
_TORCH_BYTES = 8  # per parameter, for the temporaries of torch's foreach
_CACHE_MULTIPLE = 4  # a set that is larger by this leaves nothing to the cache
_IN_CACHE_PARAMETERS = 1 << 14


class Bound(Enum):
    """What takes longer in an update: to bring its bytes, or to compute."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """What to measure. None: as many parameters as make several GB, as many threads as training would use."""

    num_parameters: int | None = None
    kernel: str = ALL
    threads: tuple[int, ...] = ()
    num_rounds: int = 9


@dataclass(frozen=True, slots=True)
class AdamResult:
    """One contender on one path: rates are medians over the rounds, with the slowest and the fastest round."""

    path: str  # "fp32", "bf16_split", ...
    kernel: str  # an instruction set, "torch_fused", "torch_foreach", or "limit": the bare loop over the same bytes
    threads: int
    parameters_per_second: float
    parameters_per_second_min: float
    parameters_per_second_max: float
    bytes_per_second: float  # read and written
    ratio_to_limit: float
    ratio_to_torch_fused: float | None  # None on paths that torch does not have
    arithmetic_parameters_per_second: float | None  # of all threads, were there no memory to wait for; ours only
    bound: Bound | None


@dataclass(frozen=True, slots=True)
class AdamReport:
    """All results, and what they were measured with."""

    num_parameters: int
    working_set_bytes: int  # of the smallest path
    last_level_cache_bytes: int | None
    num_rounds: int
    notes: tuple[str, ...]
    results: tuple[AdamResult, ...]

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        rows = [{**asdict(result), "bound": None if result.bound is None else result.bound.value} for result in self.results]
        return {**asdict(self), "results": rows}


def run_adam_benchmark(
    settings: AdamSettings, *, on_progress: Callable[[str], None] = lambda _: None, free: HostLimit | None = None
) -> AdamReport:
    """Measure every path with every kernel and thread count, in turn with torch and with the bare loop.

    Raises ConfigError for settings that make no sense, DoesNotFit where memory does not suffice, PlatformError without the
    native module.
    """
    names = _names(settings)
    if settings.num_rounds < 1:
        raise ConfigError(f"Rounds: {settings.num_rounds} is too few.", remedy="Give 1 or more.")
    num_parameters = _num_parameters(settings, free or host_limit_bytes())
    teams = _teams(names, settings.threads)
    results: list[AdamResult] = []
    threads_before = torch.get_num_threads()
    with open_adam_data_arena(num_parameters, PATHS) as arena:
        data = AdamData(arena.buffer, num_parameters)
        try:
            for path in PATHS:
                data.fill(path)
                for kernels in teams:
                    torch.set_num_threads(kernels[0].num_threads)
                    results += _measure(path, data, kernels, settings.num_rounds, on_progress)
        finally:
            torch.set_num_threads(threads_before)
    held = num_parameters * min(path.bytes_held for path in PATHS)
    return AdamReport(
        num_parameters=num_parameters,
        working_set_bytes=held,
        last_level_cache_bytes=last_level_cache_bytes(),
        num_rounds=settings.num_rounds,
        notes=_notes(held, last_level_cache_bytes()),
        results=tuple(results),
    )


def _measure(
    path: AdamPath, data: AdamData, kernels: Sequence[AdamKernel], num_rounds: int, on_progress: Callable[[str], None]
) -> list[AdamResult]:
    threads = kernels[0].num_threads
    contenders = [limit(kernels[0], path, data), *(ours(kernel, path, data) for kernel in kernels)]
    if path.master is MasterFormat.FP32:
        contenders += [torch_adamw(path, data, fused=True), torch_adamw(path, data, fused=False)]

    def said(number: int) -> None:
        on_progress(f"{path.name}, {threads} threads, round {number + 1} of {num_rounds}")

    timings = time_in_turn(contenders, num_rounds, on_round=said)
    arithmetic = {kernel.name: _arithmetic_seconds(kernel, path, data) for kernel in kernels}
    return [
        _result(path, contender, threads, data.num_parameters, timings, arithmetic.get(contender.name))
        for contender in contenders
    ]


def _arithmetic_seconds(kernel: AdamKernel, path: AdamPath, data: AdamData) -> float:
    """Return the seconds that one core takes for one parameter when all bytes are in its second level of cache."""
    alone = open_kernel(num_threads=1, environment={KERNEL_VARIABLE: kernel.name})
    few = min(_IN_CACHE_PARAMETERS, data.num_parameters)
    small = Contender("small", ours(alone, path, data, few).run)
    call = Contender("call", ours(alone, path, data, 1).run)  # what a call costs beside its work
    timings = time_in_turn([small, call], num_rounds=5)
    return max(timings["small"].median - timings["call"].median, 1e-12) / few


def _result(
    path: AdamPath, contender: Contender, threads: int, num_parameters: int, timings: Mapping[str, Timings],
    arithmetic_seconds: float | None,
) -> AdamResult:  # fmt: skip
    mine, fused = timings[contender.name], timings.get(TORCH_FUSED)
    bound = None
    if arithmetic_seconds is not None:
        computing = arithmetic_seconds * num_parameters / threads
        bound = Bound.ARITHMETIC if computing > timings[LIMIT].median else Bound.MEMORY
    return AdamResult(
        path=path.name,
        kernel=contender.name,
        threads=threads,
        parameters_per_second=num_parameters / mine.median,
        parameters_per_second_min=num_parameters / max(mine.seconds),
        parameters_per_second_max=num_parameters / min(mine.seconds),
        bytes_per_second=path.bytes_moved * num_parameters / mine.median,
        ratio_to_limit=mine.ratio_to(timings[LIMIT]),
        ratio_to_torch_fused=None if fused is None else mine.ratio_to(fused),
        arithmetic_parameters_per_second=None if arithmetic_seconds is None else threads / arithmetic_seconds,
        bound=bound,
    )


def _names(settings: AdamSettings) -> tuple[str, ...]:
    available = kernel_names()
    if settings.kernel == ALL:
        return available
    if settings.kernel not in available:
        raise ConfigError(
            f"Adam kernel {settings.kernel!r}: this CPU has {', '.join(available)}.", remedy=f"Choose one, or {ALL}."
        )
    return (settings.kernel,)


def _teams(names: Sequence[str], threads: Sequence[int]) -> list[list[AdamKernel]]:
    """Return the kernels of each thread count, every count once; more threads than cores become as many as cores."""
    teams: dict[int, list[AdamKernel]] = {}
    for count in threads or (None,):
        kernels = [open_kernel(num_threads=count, environment={**os.environ, KERNEL_VARIABLE: name}) for name in names]
        teams.setdefault(kernels[0].num_threads, kernels)
    return list(teams.values())


def _num_parameters(settings: AdamSettings, free: HostLimit) -> int:
    bytes_each = max(path.bytes_held for path in PATHS) + _TORCH_BYTES
    most = int(free.num_bytes * _SPARE_SHARE) // bytes_each // _GRANULE * _GRANULE
    wanted = settings.num_parameters
    if wanted is None:
        wanted = max(_GRANULE, min(_DEFAULT_PARAMETERS, most))
    if wanted < 1:
        raise ConfigError(f"Parameters: {wanted} is too few.", remedy="Give 1 or more, such as 1e8.")
    rounded = round_up(wanted, _GRANULE)
    if rounded > most:
        raise DoesNotFit(
            f"{rounded:,} parameters need {format_bytes(rounded * bytes_each)} of memory for state, gradient and torch's "
            f"temporaries; {format_bytes(free.num_bytes)} are free ({free.source}).",
            remedy=f"Give at most {most:,}." if most else "Free memory.",
        )
    return rounded


def _notes(working_set_bytes: int, cache_bytes: int | None) -> tuple[str, ...]:
    if cache_bytes is None:
        return ("The size of this machine's caches is not known: some of the bytes may have come from them.",)
    if working_set_bytes < _CACHE_MULTIPLE * cache_bytes:
        return (
            f"The working set of {format_bytes(working_set_bytes)} is less than {_CACHE_MULTIPLE} times the last level of "
            f"cache ({format_bytes(cache_bytes)}): some of the bytes came from there, not from memory.",
        )
    return ()
