"""Sums of gradients wait in the store until they are finished: side by side, in RAM or in a swap file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_cases import (
    LazyEngine,
    assert_same_bytes,
    content,
    fill,
    fill_store,
    in_memory,
    make_store,
    mixed,
    odd_layouts,
    on_nvme,
    page_buffer,
    read_store,
)

from infinity.aio.engine import Engine
from infinity.errors import IllegalTransition
from infinity.memory.ledger import Ledger
from infinity.states import Tier
from infinity.store.commit import read_commit
from infinity.store.extents import gradient_window, sum_bytes, waiting_bytes
from infinity.store.layout import ShardLayout
from infinity.store.shares import ShardShares
from infinity.telemetry.recorder import Recorder

NUM_SUMS = 2
Shards = Sequence[tuple[ShardLayout, ShardShares]]
Placing = Callable[[Sequence[ShardLayout]], list[tuple[ShardLayout, ShardShares]]]


def with_sums(shards: Shards) -> list[tuple[ShardLayout, ShardShares]]:
    """Two sums for each shard that has a gradient."""
    return [(layout, replace(shares, num_sums=NUM_SUMS if layout.tiles else 0)) for layout, shares in shards]


def sums_of(shards: Shards) -> list[tuple[int, int, int]]:
    """Every (shard, number, bytes)."""
    return [(layout.index, k, sum_bytes(layout)) for layout, shares in shards for k in range(shares.num_sums)]


@pytest.mark.parametrize("place", [on_nvme, mixed, in_memory])
def test_sums_come_back_bit_for_bit_and_touch_nothing_else(tmp_path: Path, engine: Engine, place: Placing) -> None:
    """Each sum is its own: neither another sum nor a weight or tile changes with it, wherever it waits."""
    shards = with_sums(place(odd_layouts()))
    store = make_store([tmp_path], engine, shards)
    others, expected = fill_store(store, shards), {}
    for seed, (shard, number, num_bytes) in enumerate(sums_of(shards)):
        source = page_buffer(num_bytes)
        expected[shard, number] = fill(source, seed)
        store.publish_sum(shard, number, source).wait()
    for shard, number, num_bytes in reversed(sums_of(shards)):
        into = page_buffer(num_bytes)
        store.fetch_sum(shard, number, into).wait()
        assert torch.equal(content(into, num_bytes), expected[shard, number])
    assert_same_bytes(read_store(store, shards), others)
    store.close()


@pytest.mark.parametrize("place", [on_nvme, in_memory])
def test_the_finished_gradient_takes_the_place_of_the_first_sum(tmp_path: Path, engine: Engine, place: Placing) -> None:
    """It is read by tile as ever, and the second sum is still there."""
    shards = with_sums(place(odd_layouts()))
    store = make_store([tmp_path], engine, shards)
    layout = shards[0][0]
    first, second, finished = (page_buffer(sum_bytes(layout)) for _ in range(3))
    fill(first, 1)
    expected_sum, expected = fill(second, 2), fill(finished, 3)
    store.publish_sum(0, 0, first)
    store.publish_sum(0, 1, second)
    store.publish_gradients(0, finished).wait()
    for tile in layout.tiles:
        window = gradient_window(tile, 2)
        into = page_buffer(window.num_bytes)
        store.fetch_gradients(tile, into).wait()
        assert torch.equal(content(into, window.num_bytes), expected[window.offset :][: window.num_bytes])
    store.fetch_sum(0, 1, second).wait()
    assert torch.equal(content(second, second.num_bytes), expected_sum)
    store.close()


def test_resident_sums_lie_one_behind_the_other(tmp_path: Path, threads_engine: Engine) -> None:
    """The store gives the place itself, so that sums in RAM are added to where they are."""
    shards, recorder = with_sums(in_memory(odd_layouts())), Recorder()
    store = make_store([tmp_path], threads_engine, shards, recorder=recorder)
    num_bytes = sum_bytes(shards[1][0])
    source, buffer = page_buffer(num_bytes), store.gradients(1)
    expected = fill(source, 5)
    store.publish_sum(1, 1, source).wait()
    assert buffer is not None
    assert buffer.num_bytes == NUM_SUMS * num_bytes
    assert torch.equal(content(buffer.part(num_bytes, num_bytes), num_bytes), expected)
    assert recorder.counters() == {}
    store.close()


def test_sums_are_counted_as_spilled_in_whole_pages(tmp_path: Path, threads_engine: Engine) -> None:
    """What is written of a sum is in both write counters, what is read in the reads."""
    shards, recorder = with_sums(on_nvme(odd_layouts())), Recorder()
    store = make_store([tmp_path], threads_engine, shards, recorder=recorder)
    buffer = page_buffer(sum_bytes(shards[0][0]))
    for number in range(NUM_SUMS):
        store.publish_sum(0, number, buffer).wait()
    store.fetch_sum(0, 1, buffer).wait()
    written = NUM_SUMS * buffer.num_bytes
    assert recorder.counters() == {
        "nvme_write_bytes": written,
        "gradient_spill_bytes": written,
        "nvme_read_bytes": buffer.num_bytes,
    }
    store.close()


def test_room_for_sums_is_booked_and_reserved(tmp_path: Path, threads_engine: Engine) -> None:
    """In RAM the ledger's gradients are the sums' bytes; on NVMe the swap file has as many more."""
    shards, ledger = with_sums(mixed(odd_layouts())), Ledger({})
    store = make_store([tmp_path], threads_engine, shards, ledger=ledger)
    waiting = {layout.index: waiting_bytes(layout, shares, 2) for layout, shares in shards}
    assert all(waiting[layout.index] == shares.num_sums * sum_bytes(layout) for layout, shares in shards)
    in_ram = sum(waiting[layout.index] for layout, shares in shards if shares.grads is Tier.CPU)
    assert {line.owner: line.used_bytes for line in ledger.report()}["gradients"] == in_ram
    with_room = (store.directories[0] / "swap.bin").stat().st_size
    store.close()
    plain = make_store([tmp_path], threads_engine, mixed(odd_layouts()))
    without_room = (plain.directories[0] / "swap.bin").stat().st_size
    plain.close()
    spilled = [layout for layout, shares in shards if shares.grads is Tier.NVME]
    assert with_room - without_room == sum(waiting[layout.index] - layout.grad_bytes(2) for layout in spilled)


def test_a_fetched_sum_has_the_bytes_of_the_write_in_flight(tmp_path: Path, threads_engine: Engine) -> None:
    """With writes that happen only when waited for, a fetch that did not wait would read old bytes."""
    shards = with_sums(on_nvme(odd_layouts()))
    store = make_store([tmp_path], LazyEngine(threads_engine), shards)
    source, into = page_buffer(sum_bytes(shards[0][0])), page_buffer(sum_bytes(shards[0][0]))
    for seed in (1, 2):
        expected = fill(source, seed)
        store.publish_sum(0, 1, source)
        store.fetch_sum(0, 1, into).wait()
        assert torch.equal(content(into, into.num_bytes), expected)
    store.close()


@pytest.mark.parametrize("place", [on_nvme, in_memory])
def test_a_sum_that_has_no_room_is_refused(tmp_path: Path, threads_engine: Engine, place: Placing) -> None:
    """It would be written over its neighbour."""
    shards = with_sums(place(odd_layouts()))
    store = make_store([tmp_path], threads_engine, shards)
    with pytest.raises(IllegalTransition, match="not inside"):
        store.publish_sum(0, NUM_SUMS, page_buffer(sum_bytes(shards[0][0])))
    store.close()


def test_a_commit_in_place_remembers_the_room(tmp_path: Path, threads_engine: Engine) -> None:
    """Sums are no part of a checkpoint, but who takes it over must make the same room."""
    shards = with_sums(on_nvme(odd_layouts()))
    store = make_store([tmp_path], threads_engine, shards)
    expected = fill_store(store, shards)
    store.commit_in_place({})
    run = store.directories[0]
    store.publish_sum(0, 0, page_buffer(sum_bytes(shards[0][0]))).wait()
    assert read_commit(run).shares == tuple(shares for _, shares in shards)  # a spill destroys nothing of it
    store.close(keep=True)
    adopted = make_store([], threads_engine, shards, adopt=run)
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.close()
