"""Learning-rate schedules as pure functions of the step: step k, counted from 0, uses schedule(k)."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from infinity.errors import ConfigError

Schedule = Callable[[int], float]


class ScheduleKind(str, Enum):
    """The course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"  # down to 0 at the end of training
    COSINE = "cosine"  # half a cosine down to 0 at the end of training


_DECAYS: dict[ScheduleKind, Callable[[float], float]] = {
    ScheduleKind.CONSTANT: lambda progress: 1.0,
    ScheduleKind.LINEAR: lambda progress: 1.0 - progress,
    ScheduleKind.COSINE: lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
}


def build_schedule(
    kind: ScheduleKind | str, *, peak_lr: float, num_steps: int, num_warmup_steps: int = 0, min_ratio: float = 0.0
) -> Schedule:
    """Return the schedule: from 0 in `num_warmup_steps` equal steps up to `peak_lr`, then down until step `num_steps`.

    Linear and cosine end at `min_ratio` of the peak.

    Step `num_warmup_steps` is the first at the peak. Steps beyond the end keep the last value.
    Raises ConfigError for an unknown kind and for counts that contradict each other.
    """
    names = ", ".join(member.value for member in ScheduleKind)
    if kind not in list(ScheduleKind):
        raise ConfigError(f"lr_schedule: {kind!r} is unknown.", remedy=f"Choose one of {names}.")
    if not 0 <= num_warmup_steps <= num_steps:
        raise ConfigError(
            f"warmup_steps: {num_warmup_steps} is not between 0 and the number of steps, {num_steps}.",
            remedy="Warm up for fewer steps or train for more.",
        )
    decay = _DECAYS[ScheduleKind(kind)]
    num_decay_steps = max(1, num_steps - num_warmup_steps)

    def schedule(step: int) -> float:
        if step < num_warmup_steps:
            return peak_lr * step / num_warmup_steps
        remaining = decay(min(1.0, (step - num_warmup_steps) / num_decay_steps))
        return peak_lr * (min_ratio + (1.0 - min_ratio) * remaining)

    return schedule
