"""DeepSpeed's schedules that warm up: WarmupLR, WarmupDecayLR, WarmupCosineLR, by its public formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from infinity.optim.schedules import Schedule

WarmupType = Literal["log", "linear"]
_LEAST_STEPS = 2  # the logarithm of 1 is no divisor


def warmup(*, min_lr: float, max_lr: float, num_warmup_steps: int, kind: WarmupType) -> Schedule:
    """Return WarmupLR: from `min_lr` up to `max_lr`, which stays."""
    share = _warmup_share(num_warmup_steps, kind, lambda step: 1.0)
    return lambda step: min_lr + (max_lr - min_lr) * share(step)


def warmup_decay(*, min_lr: float, max_lr: float, num_warmup_steps: int, num_steps: int, kind: WarmupType) -> Schedule:
    """Return WarmupDecayLR: as WarmupLR, then in a straight line back to `min_lr` at step `num_steps`."""
    num_decay_steps = max(1, num_steps - max(_LEAST_STEPS, num_warmup_steps))
    share = _warmup_share(num_warmup_steps, kind, lambda step: max(0.0, (num_steps - step) / num_decay_steps))
    return lambda step: min_lr + (max_lr - min_lr) * share(step)


def warmup_cosine(
    *, peak_lr: float, min_ratio: float, end_ratio: float, num_warmup_steps: int, num_steps: int, kind: WarmupType
) -> Schedule:
    """Return WarmupCosineLR: from `min_ratio` of the peak up to it, then half a cosine down to `end_ratio`, which stays."""
    first = max(_LEAST_STEPS, num_warmup_steps)
    rising = _warmup_share(num_warmup_steps, kind, lambda step: 1.0)

    def schedule(step: int) -> float:
        if step < first:
            return peak_lr * (min_ratio + (1.0 - min_ratio) * rising(step))
        progress = min(1.0, (step - first + 1) / max(1, num_steps - first))
        return peak_lr * (end_ratio + (1.0 - end_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0)

    return schedule


def _warmup_share(num_warmup_steps: int, kind: WarmupType, after: Callable[[int], float]) -> Callable[[int], float]:
    num = max(_LEAST_STEPS, num_warmup_steps)

    def share(step: int) -> float:
        if step >= num:
            return after(step)
        return math.log(step + 1) / math.log(num) if kind == "log" else step / num

    return share
