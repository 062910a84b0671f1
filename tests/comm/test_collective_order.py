"""The order of collectives as a chain of digests: where two ranks first differ, and how it crosses the store."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from infinity.comm.beats import Beat, RankState, from_json, to_json
from infinity.comm.buckets import cut
from infinity.comm.order import Order

UNITS = st.lists(st.sampled_from("abc"), max_size=12)


def order_of(units: Sequence[str], step: int = 0) -> Order:
    """Return the order of a rank that visits these units."""
    order = Order()
    order.begin_step(step)
    for unit in units:
        order.add(unit)
    return order


@given(ours=UNITS, theirs=UNITS)
def test_the_first_difference_is_found_and_being_ahead_is_none(ours: list[str], theirs: list[str]) -> None:
    """Two orders differ where their lists first do; a rank that is ahead does not differ."""
    difference = order_of(ours).first_difference(order_of(theirs).tail(100))
    expected = next((number for number, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    assert (difference.number if difference else None) == expected
    if difference:
        assert [entry.what for entry in difference.ours] == ours[max(0, difference.number - 3) : difference.number + 1]
        assert [entry.what for entry in difference.theirs] == theirs[max(0, difference.number - 3) : difference.number + 1]


def test_the_step_is_part_of_the_order() -> None:
    """The same unit in another step is another collective."""
    assert order_of("ab", step=1).first_difference(order_of("ab", step=2).tail(9)) is not None


def test_a_difference_long_ago_shows_in_the_last_entries() -> None:
    """Digests carry the whole past, so the published tail is enough."""
    ours, theirs = order_of("x" + "a" * 200), order_of("y" + "a" * 200)
    assert ours.first_difference(theirs.tail(3)) is not None
    assert ours.first_difference(order_of("x" + "a" * 150).tail(3)) is None


def test_beats_cross_the_store_unchanged() -> None:
    """What a rank publishes is what another reads."""
    beat = Beat(3, RankState.FAILED, "disk full", "host", 12, 1 << 31, 5, 2, order_of("ab", step=5).tail(2))
    assert from_json(to_json(beat)) == beat
    assert "2.00 GiB resident" in beat.words()


@given(num_elements=st.integers(0, 10_000), bucket_elements=st.integers(1, 3000))
def test_buckets_cover_a_shard_once(num_elements: int, bucket_elements: int) -> None:
    """In ascending order, none empty, none too large."""
    buckets = cut(num_elements, bucket_elements)
    assert [element for bucket in buckets for element in range(bucket.start, bucket.stop)] == list(range(num_elements))
    assert all(0 < bucket.stop - bucket.start <= bucket_elements for bucket in buckets)
