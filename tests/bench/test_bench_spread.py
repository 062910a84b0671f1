"""Medians, percentiles, intervals and histograms of the benchmarks."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.bench.spread import bootstrap_interval, histogram, percentile, spread_of


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_occurred(share: float, expected: int) -> None:
    """Of 1 to 100 the p-th percentile is p: nearest rank, nothing interpolated."""
    assert percentile(range(1, 101), share) == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=15))
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    """The interval of the median lies inside the range and around the median, and is the same every time."""
    spread = spread_of(values)
    assert spread.least <= spread.low <= spread.median <= spread.high <= spread.greatest
    assert spread.median == median(values)
    assert bootstrap_interval(values) == (spread.low, spread.high)


def test_the_interval_shrinks_with_agreement() -> None:
    """Values that agree give a point, values that spread give an interval."""
    assert bootstrap_interval([2.0] * 9) == (2.0, 2.0)
    low, high = bootstrap_interval([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0])
    assert (low, high) == (1.0, 3.0)


def test_a_histogram_counts_everything_once_up_to_each_power_of_two() -> None:
    """1 belongs to the first power, a value just above a power to the next; empty powers are left out."""
    assert histogram([0.2, 1.0, 1.5, 2.0, 2.1, 4.0, 100.0]) == {1: 2, 2: 2, 4: 2, 128: 1}
