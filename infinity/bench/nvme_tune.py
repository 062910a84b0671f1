"""Finds engine, block size and queue depth for training, in bounded time, and says them as a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic
from infinity.byte_sizes import GIB, KIB, MIB

DEFAULT_BLOCK_BYTES, DEFAULT_QUEUE_DEPTH = MIB, 32  # those of the configuration
BLOCK_BYTES = (256 * KIB, 512 * KIB, 2 * MIB, 4 * MIB, 8 * MIB)
QUEUE_DEPTHS = (8, 16, 64)
NUM_FINALS = 2
_FILE_BYTES = GIB
_TRIAL_SECONDS = 0.35
# What a change must gain, because two measurements of one setting differ by about as much.
_WORTH = 0.03
# More than that on its way gains nothing on any disk and takes memory.
_MOST_IN_FLIGHT_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True)
class Setting:
    """What training can be told about the way it reads and writes."""

    engine: str
    block_bytes: int
    queue_depth: int


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting gave, in bytes per second."""

    setting: Setting
    read_rate: float
    write_rate: float

    @property
    def seconds_per_gb(self) -> float:
        """The time to read a GB and write a GB, as an update of optimizer state does."""
        return 1e9 / self.read_rate + 1e9 / self.write_rate


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best setting, all trials in order, and whether time ran out before all candidates were tried."""

    best: Setting
    trials: tuple[Trial, ...]
    cut_short: bool


def tuning_settings(settings: NvmeSettings) -> NvmeSettings:
    """Return the settings with which a search measures: short runs on a smaller file."""
    return replace(settings, wanted_bytes=_FILE_BYTES, seconds=_TRIAL_SECONDS, long_run_seconds=0.0)


def candidate_jobs() -> tuple[Job, ...]:
    """Return the jobs that a search may run."""
    blocks, depths = (DEFAULT_BLOCK_BYTES, *BLOCK_BYTES), (DEFAULT_QUEUE_DEPTH, *QUEUE_DEPTHS)
    return tuple(
        Job(traffic, num_bytes, depth)
        for traffic, num_bytes, depth in product((Traffic.READ, Traffic.WRITE), blocks, depths)
        if num_bytes * depth <= _MOST_IN_FLIGHT_BYTES
    )


class _OutOfTime(Exception):
    """The search ends with what it has."""


class _Search:
    """Walks through engines, blocks and depths; a setting is left only for one that is better by more than noise."""

    def __init__(self, try_out: Callable[[Setting], Trial], seconds_left: Callable[[], float]) -> None:
        self._try_out = try_out
        self._seconds_left = seconds_left
        self._longest_seconds = 0.0
        self.trials: list[Trial] = []

    def seconds_per_gb(self, setting: Setting) -> float:
        """Return the median of a setting's trials so far."""
        return median(trial.seconds_per_gb for trial in self.trials if trial.setting == setting)

    def try_setting(self, setting: Setting) -> None:
        """Measure a setting. Raises _OutOfTime when the time that is left would not do."""
        before = self._seconds_left()
        if before < self._longest_seconds:
            raise _OutOfTime
        self.trials.append(self._try_out(setting))
        self._longest_seconds = max(self._longest_seconds, before - self._seconds_left())

    def better_of(self, current: Setting, candidates: Sequence[Setting]) -> Setting:
        """Try the candidates and return the best of them where it is worth leaving the current one."""
        for candidate in candidates:
            if candidate.block_bytes * candidate.queue_depth <= _MOST_IN_FLIGHT_BYTES:
                self.try_setting(candidate)
        return self.choose(current, candidates)

    def choose(self, current: Setting, candidates: Sequence[Setting]) -> Setting:
        """Return the best candidate that was tried where it is worth leaving the current setting."""
        tried = {trial.setting for trial in self.trials}
        best = min((c for c in candidates if c in tried), key=self.seconds_per_gb, default=current)
        worth_it = self.seconds_per_gb(best) < (1 - _WORTH) * self.seconds_per_gb(current)
        return best if worth_it else current


def search(engines: Sequence[str], try_out: Callable[[Setting], Trial], seconds_left: Callable[[], float]) -> Tuned:
    """Find the best setting: first the engine, then the block, then the depth; at last it must beat the default again.

    At least the default of the first engine is tried, whatever `seconds_left` says.
    """
    walk = _Search(try_out, seconds_left)
    default = best = Setting(engines[0], DEFAULT_BLOCK_BYTES, DEFAULT_QUEUE_DEPTH)
    walk.try_setting(default)
    try:
        others = [Setting(engine, DEFAULT_BLOCK_BYTES, DEFAULT_QUEUE_DEPTH) for engine in engines[1:]]
        best = walk.better_of(best, others)
        best = walk.better_of(best, [Setting(best.engine, num_bytes, best.queue_depth) for num_bytes in BLOCK_BYTES])
        best = walk.better_of(best, [Setting(best.engine, best.block_bytes, depth) for depth in QUEUE_DEPTHS])
        for _ in range(NUM_FINALS if best != default else 0):
            walk.try_setting(default)
            walk.try_setting(best)
        best = walk.choose(default, [best])
        cut_short = False
    except _OutOfTime:
        best = walk.choose(default, [trial.setting for trial in walk.trials])
        cut_short = True
    return Tuned(best, tuple(walk.trials), cut_short)


def config_section(setting: Setting, directories: Sequence[Path]) -> dict[str, object]:
    """Return a configuration with which `infinity train` uses the setting in these directories."""
    return {
        "aio": {"block_size": setting.block_bytes, "queue_depth": setting.queue_depth},
        "infinity": {"nvme": [str(path) for path in directories], "engine": setting.engine},
    }
