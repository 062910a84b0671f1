"""Ranks that cannot go on together get a typed error on every rank that still waits, and never a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rank_threads import on_every_rank, open_threads

from infinity.comm.group import Group
from infinity.comm.watch import Pace
from infinity.errors import CommError


def errors_of(groups: list[Group], job) -> list[CommError]:
    """Run job(group) on every rank, which must raise CommError everywhere; then end the groups."""
    results = on_every_rank(len(groups), lambda rank: job(groups[rank]))
    for group in groups:
        group.fail("the test is over")
    assert [type(result) for result in results] == [CommError] * len(groups), results
    return results  # type: ignore[return-value]


def visit(group: Group, unit: str, num_elements: int = 30) -> None:
    """Gather one unit."""
    shard = torch.zeros(num_elements // group.size)
    group.all_gather(shard, torch.empty(num_elements), what=unit).wait()


@pytest.mark.parametrize("sizes", [(30, 30), (30, 300)], ids=["equal sizes", "different sizes"])
def test_different_orders_are_named_with_rank_step_and_both_orders(sizes: tuple[int, int]) -> None:
    """Two units in another order on one rank: an error before any data of one lands in the other (C92)."""

    def job(group: Group) -> None:
        group.begin_step(7)
        visit(group, "blocks.0")
        units = ["blocks.1", "blocks.2"] if group.rank == 0 else ["blocks.2", "blocks.1"]
        for unit in units:
            visit(group, unit, sizes[int(unit == "blocks.2")])

    first, second = errors_of(open_threads(2), job)
    for error, ours, theirs in ((first, "0", "1"), (second, "1", "0")):
        assert error.exit_code == 8
        assert f"Rank {ours} in step 7 and rank {theirs} in step 7" in error.message
        assert "from number 1 on" in error.message
        assert error.message.count("all_gather of blocks.0") == 2
        assert "all_gather of blocks.1" in error.message
        assert "all_gather of blocks.2" in error.message
        assert "blocks.2" not in error.message.split("rank 0 for", 1)[1].split(";")[0]


def test_data_that_ends_earlier_on_one_rank_is_an_error_on_all() -> None:
    """Rank 1 has two steps and closes, ranks 0 and 2 begin a third: every one of them is told, with the steps."""

    def job(group: Group) -> None:
        for step in range(2 if group.rank == 1 else 3):
            group.begin_step(step)
            visit(group, "blocks.0")
        group.close()

    for error in errors_of(open_threads(3), job):
        assert "gather of the end (step 1)" in error.message
        assert "all_gather of blocks.0" in error.message
        assert "(step 2)" in error.message
        assert "data that ends earlier" in error.remedy


def test_a_rank_that_fails_tells_the_others_why() -> None:
    """An exception on rank 1 is what rank 0, which waits for it, dies of (C130)."""

    def job(group: Group) -> None:
        group.begin_step(2)
        visit(group, "blocks.0")
        if group.rank == 1:
            group.fail("ValueError: no such token.")
            group.begin_step(3)
        visit(group, "blocks.1")

    first, second = errors_of(open_threads(2), job)
    assert "Rank 1 failed: ValueError: no such token." in first.message
    assert "in step 2" in first.message
    assert "ValueError" in second.message


def test_a_silent_rank_is_dead_with_its_last_known_memory() -> None:
    """A rank whose beats stop is found while the others wait for it, and the error quotes what it said last (C40, C131)."""
    groups = open_threads(2, pace=Pace(beat_seconds=0.05, dead_seconds=1.0))
    groups[0].begin_step(4)

    def silent(group: Group) -> None:
        if group.rank == 1:
            group._watch._ending = True  # type: ignore[attr-defined]  # its threads end and say nothing, as if killed
            raise CommError("killed")
        visit(group, "blocks.0")

    first, _ = errors_of(groups, silent)
    assert "Rank 1 is dead" in first.message
    assert "2.00 GiB resident" in first.message


def test_work_asked_for_after_an_error_gets_the_same_error() -> None:
    """Handles that were not done and every later call raise what ended the group."""
    groups = open_threads(2)

    def job(group: Group) -> None:
        if group.rank == 1:
            group.fail("out of memory.")
            raise CommError("failed here")
        waiting = [group.all_gather(torch.zeros(1), torch.zeros(2), what=f"unit {number}") for number in range(3)]
        errors = []
        for handle in reversed(waiting):
            with pytest.raises(CommError, match="out of memory") as caught:
                handle.wait()
            errors.append(caught.value)
            assert handle.done()
        with pytest.raises(CommError, match="out of memory"):
            waiting[0].wait()
        group.gather(None, what="more")

    first, _ = errors_of(groups, job)
    assert "out of memory" in first.message


def test_a_slow_rank_is_waited_for() -> None:
    """A rank that is late by more than the time after which silence is death is not dead: it still beats."""
    groups = open_threads(2, pace=Pace(beat_seconds=0.05, dead_seconds=3.0))

    def job(group: Group) -> None:
        if group.rank == 1:
            time.sleep(3.4)
        visit(group, "blocks.0")
        group.close()

    assert on_every_rank(2, lambda rank: job(groups[rank])) == [None, None]


def test_one_group_after_another_over_one_store() -> None:
    """What the first group said in the store says nothing about the second."""
    store = dist.HashStore()
    for units in (["blocks.0", "blocks.1"], ["blocks.1"]):
        groups = open_threads(2, store=store)

        def job(group: Group, units: list[str] = units) -> None:
            for unit in units:
                visit(group, unit)
            time.sleep(0.2)
            group.close()

        assert on_every_rank(2, lambda rank: job(groups[rank])) == [None, None]  # noqa: B023 - run at once
