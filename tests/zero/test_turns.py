"""Turns: in which order shards become final where several ranks have to reduce them in one order."""

import pytest

from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.unit_size import undivided
from infinity.zero.shard import Residency, Shard
from infinity.zero.turns import Turns, first_turns
from infinity.zero.units import ParameterGroup


def test_a_shard_that_is_ready_early_waits_for_its_turn():
    """0 and 1 are ready before 2, which comes first: nothing is final until 2 is, and then all are, in order."""
    turns = Turns([2, 1, 0])
    assert list(turns.ready(0)) == []
    assert list(turns.ready(1)) == []
    assert list(turns.ready(2)) == [2, 1, 0]
    assert list(turns.rest()) == []


def test_what_never_became_ready_is_final_at_the_end_and_nothing_twice():
    """The end yields the others in order, also those that are ready behind one that is not."""
    turns = Turns([3, 2, 1, 0])
    assert list(turns.ready(3)) == [3]
    assert list(turns.ready(1)) == []
    assert list(turns.rest()) == [2, 1, 0]
    assert list(turns.rest()) == []


def test_the_order_of_a_step_is_observed_and_may_be_agreed_for_the_next():
    """Ready shards come as they came, the others behind them; an order counts from the next beginning on."""
    turns = Turns([2, 1, 0])
    for shard in (0, 2):
        list(turns.ready(shard))
    list(turns.rest())
    turns.begin()
    assert turns.observed == (0, 2, 1)
    turns.agree(turns.observed)
    assert list(turns.ready(0)) == [0]
    assert list(turns.rest()) == [2, 1]


def test_a_step_without_anything_keeps_what_was_observed():
    """An evaluation, or a step that is discarded, changes no order."""
    turns = Turns([1, 0])
    list(turns.ready(0))
    turns.begin()
    turns.begin()
    assert turns.observed == (0, 1)


def test_a_shard_without_a_turn_is_ignored():
    """A unit whose parameters are all frozen is never reduced, whoever calls it."""
    turns = Turns([1, 0])
    assert list(turns.ready(7)) == []
    list(turns.ready(1))
    turns.begin()
    assert turns.observed == (1, 0)


@pytest.mark.parametrize("root", [0, 2])
def test_at_first_units_come_from_last_to_first_then_the_root(root):
    """Backward makes the last unit final first; the root group is final when backward has ended. Frozen ones have none."""
    shards = []
    for index in range(4):
        layout = shard_layout(index, f"unit{index}", [ParameterSpec("w", (3,), "float32", index != 1)], tile_elements=64)
        group = ParameterGroup(index, f"unit{index}", (), () if index == root else (index,))
        shards.append(Shard(group, undivided(layout), Residency.ABSENT, {}))
    expected = [index for index in (3, 2, 0) if index != root] + [root]
    assert list(first_turns(shards).rest()) == expected
