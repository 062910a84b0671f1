"""The processes that play ranks: used again for the next job, and never waited for in vain."""

from __future__ import annotations

import time

import pytest
from rank_errands import die_on, fail_on, sleep_on, sum_over_ranks
from rank_pool import RankPool, RanksFailed


def test_one_set_of_processes_plays_jobs_of_every_size(ranks: RankPool) -> None:
    """Two, three and two ranks meet in groups of their own, in the same processes."""
    values = [{"value": 1.0}, {"value": 2.0}, {"value": 4.0}]
    first = ranks.run(2, sum_over_ranks, by_rank=values)
    second = ranks.run(3, sum_over_ranks, by_rank=values)
    third = ranks.run(2, sum_over_ranks, by_rank=values)
    assert [[total for _, total in results] for results in (first, second, third)] == [[3.0] * 2, [7.0] * 3, [3.0] * 2]
    assert first == third
    assert [pid for pid, _ in second[:2]] == [pid for pid, _ in first]


def test_an_exception_is_reported_with_its_traceback(ranks: RankPool) -> None:
    """The error of one rank names it, its class, its exit code and the line that raised it."""
    outcomes = ranks.outcomes(2, fail_on, rank=1)
    assert [outcome.error for outcome in outcomes] == [None, "CommError"]
    assert outcomes[1].exit_code == 8
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: came to the end.*rank 1: CommError.*in fail_on"):
        ranks.run(2, fail_on, rank=1)


def test_a_dead_rank_is_reported_and_replaced(ranks: RankPool) -> None:
    """A process that was killed is an outcome at once, and the next job has a new one."""
    assert [outcome.error for outcome in ranks.outcomes(2, die_on, rank=0)] == ["died", None]
    assert [total for _, total in ranks.run(2, sum_over_ranks, value=1.0)] == [2.0, 2.0]


def test_a_hanging_rank_says_where_and_is_ended(ranks: RankPool) -> None:
    """A rank that does not answer in time is killed, and its report names the function that it hangs in."""
    before = time.monotonic()
    outcomes = ranks.outcomes(2, sleep_on, rank=1, seconds=1.0)
    assert time.monotonic() - before < 60
    assert outcomes[0].error is None
    assert outcomes[1].error == "no answer in 1 s"
    assert "in sleep_on" in outcomes[1].traceback
    assert [total for _, total in ranks.run(2, sum_over_ranks, value=1.0)] == [2.0, 2.0]
