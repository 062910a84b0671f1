"""What several measurements of one thing say together: median, range, bootstrap interval, percentiles, histogram."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the least and the greatest of them, and the 95 % bootstrap interval of the median."""

    median: float
    least: float
    greatest: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    low, high = bootstrap_interval(values)
    return Spread(median(values), min(values), max(values), low, high)


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median; the resamples are the same in every call.

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    random = Random(0)
    medians = sorted(median(random.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    tail = (1.0 - level) / 2
    return percentile(medians, tail), percentile(medians, 1.0 - tail)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values, given in ascending order, do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def histogram(values: Sequence[float]) -> dict[int, int]:
    """Return how many values lie up to each power of two, above the power before it; empty powers are left out."""
    counts = Counter(1 << max(0, math.ceil(value) - 1).bit_length() for value in values)
    return dict(sorted(counts.items()))
