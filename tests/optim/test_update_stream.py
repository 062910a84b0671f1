"""The stream updates every touched tile once, in order, overlapped, within its slots, with the bits of the reference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from optim_fakes import (
    DTYPES,
    FakeStore,
    Model,
    differing,
    expect_step,
    make_layouts,
    make_model,
    make_step,
    read_model,
    shares,
    weight_slots,
    write_model,
)

from infinity.memory.arena import Buffer
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool
from infinity.optim.hyper import UpdateStep
from infinity.optim.kernel import open_kernel
from infinity.optim.pipeline import IoPolicy
from infinity.optim.stream import UpdateStream, open_update_stream
from infinity.states import Tier
from infinity.store.layout import ShardLayout
from infinity.store.shares import ShardShares
from infinity.telemetry.recorder import Recorder, Span


class World:
    """A stream over a fake store, with the model that it should hold."""

    def __init__(self, store: FakeStore, stream: UpdateStream, recorder: Recorder, slots: BufferPool, model: Model) -> None:
        self.store = store
        self.stream = stream
        self.recorder = recorder
        self.slots = slots
        self.model = model
        self.layouts: list[ShardLayout] = [layout for layout, _ in store.shards]

    def begin(self, step: UpdateStep) -> None:
        self.stream.begin(step)
        expect_step(self.layouts, self.model, step)

    def touch_all(self, count: int = 1, grad_dtype: str = "bfloat16") -> UpdateStep:
        return make_step(self.model, dict.fromkeys(self.model, count), grad_dtype)

    def visit(self, shard: int) -> Buffer:
        """Load a shard as a forward pass does, and return its buffer once the weights are new."""
        resident = self.store.weights(shard)
        if resident is not None:
            self.stream.load(shard, resident, fetch=False).wait()
            return resident
        lease = self.slots.lease()
        load = self.stream.load(shard, lease.buffer, fetch=True)
        load.wait()
        buffer = lease.buffer
        lease.release_after(load.written)
        return buffer

    def assert_right(self) -> None:
        assert differing(read_model(self.store, self.model), self.model) == []

    def spans(self, name: str) -> list[Span]:
        return [span for span in self.recorder.spans() if span.name == name]


@contextmanager
def open_world(
    placement: list[ShardShares] | Tier,
    *,
    num_tile_slots: int = 3,
    policy: IoPolicy = IoPolicy.MIXED,
    grad_dtype: str = "bfloat16",
    delay_seconds: float = 0.0,
    num_weight_slots: int = 2,
    num_threads: int = 1,
) -> Iterator[World]:
    layouts = make_layouts()
    places = [shares(layout, placement) for layout in layouts] if isinstance(placement, Tier) else placement
    shards = list(zip(layouts, places, strict=True))
    element_bytes = DTYPES[grad_dtype].itemsize
    store = FakeStore(shards, num_tile_slots, element_bytes, delay_seconds)
    model = make_model(layouts, DTYPES[grad_dtype])
    write_model(store, model)
    recorder, slots = Recorder(), weight_slots(layouts, num_weight_slots)
    stream = open_update_stream(
        store=store, shards=shards, kernel=open_kernel(num_threads=num_threads), recorder=recorder, ledger=Ledger({}),
        grad_element_bytes=element_bytes, lease_weights=lambda shard: slots.lease(), policy=policy,
    )  # fmt: skip
    try:
        yield World(store, stream, recorder, slots, model)
    finally:
        stream.close()
        store.close()


def mixed_places() -> list[ShardShares]:
    """Weights, gradients and tiles in every combination of tiers."""
    _, second, third = make_layouts()
    return [
        ShardShares(Tier.NVME, Tier.CPU, frozenset({0, 3})),
        ShardShares(Tier.CPU, Tier.NVME, frozenset(tile.index for tile in second.tiles)),
        ShardShares(Tier.NVME, Tier.NVME, frozenset({len(third.tiles) - 1})),
    ]


PLACEMENTS = {"ram": Tier.CPU, "nvme": Tier.NVME, "mixed": mixed_places()}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("policy", list(IoPolicy))
@pytest.mark.parametrize("num_tile_slots", [1, 2, 5])
@pytest.mark.parametrize("grad_dtype", ["bfloat16", "float32"])
def test_tiers_policies_and_slots_give_the_bits_of_the_reference(
    placement: str, policy: IoPolicy, num_tile_slots: int, grad_dtype: str
) -> None:
    """Three steps; one slot is enough, no more than there are get used, drained shards are as good as loaded ones."""
    with open_world(PLACEMENTS[placement], num_tile_slots=num_tile_slots, policy=policy, grad_dtype=grad_dtype) as world:
        for count in (1, 2, 3):
            world.begin(world.touch_all(count, grad_dtype))
            assert world.stream.pending_shards == (0, 1, 2)
            for shard in (0, 1):
                world.visit(shard)
            assert world.stream.pending_shards == (2,)
            world.stream.drain()
            assert world.stream.pending_shards == ()
            world.assert_right()
        assert world.store.most_slots <= num_tile_slots


def test_results_do_not_depend_on_tile_size() -> None:
    """Tiles of 64 elements and one tile for all give the same bits."""
    found = []
    for tile_elements in (64, 1088, 1 << 20):
        layouts = make_layouts(tile_elements)
        shards = [(layout, shares(layout, Tier.NVME)) for layout in layouts]
        store, slots = FakeStore(shards, 4, 2), weight_slots(layouts, 1)
        model = make_model(layouts, torch.bfloat16)
        write_model(store, model)
        stream = open_update_stream(
            store=store, shards=shards, kernel=open_kernel(num_threads=3), recorder=Recorder(), ledger=Ledger({}),
            grad_element_bytes=2, lease_weights=lambda shard, slots=slots: slots.lease(),
        )  # fmt: skip
        stream.begin(make_step(model, dict.fromkeys(model, 4), "bfloat16"))
        stream.drain()
        stream.close()
        store.close()
        found.append(read_model(store, model))
    assert differing(found[0], found[1]) == []
    assert differing(found[0], found[2]) == []


def test_a_load_returns_new_weights_before_they_are_written() -> None:
    """The buffer holds the new weights when `wait` returns; padding and frozen weights keep every bit."""
    with open_world(Tier.NVME) as world:
        before = bytes(world.store.bytes["weights", 0, -1].tensor(torch.uint8, world.layouts[0].shard_weight_bytes))
        world.begin(world.touch_all())
        buffer = world.visit(0)
        section = world.layouts[0].sections[0]
        assert not section.trainable
        got = bytes(buffer.tensor(torch.uint8, world.layouts[0].shard_weight_bytes))
        assert got[: section.shard_elements * 2] == before[: section.shard_elements * 2]
        world.stream.drain()
        assert bytes(world.store.bytes["weights", 0, -1].tensor(torch.uint8, len(before))) == got
        assert got != before


def test_a_buffer_is_in_use_until_its_weights_are_written() -> None:
    """Overwritten the moment `written` says so, the buffer spoils nothing; with `fetch` alone, it says so after the read."""
    for policy in IoPolicy:
        with open_world(Tier.NVME, delay_seconds=0.002, policy=policy) as world:
            world.begin(world.touch_all())
            for shard in range(3):
                lease = world.slots.lease()
                load = world.stream.load(shard, lease.buffer, fetch=True)
                load.wait()
                load.written.wait()
                lease.buffer.tensor(torch.uint8, lease.buffer.num_bytes).fill_(0xEE)
                lease.release()
            world.stream.drain()
            world.assert_right()
            lease = world.slots.lease()
            world.stream.load(0, lease.buffer, fetch=True).written.wait()
            stored = world.store.bytes["weights", 0, -1].tensor(torch.uint8, world.layouts[0].shard_weight_bytes)
            assert torch.equal(lease.buffer.tensor(torch.uint8, stored.numel()), stored)
            lease.release()


def test_untouched_parameters_keep_everything_and_cost_no_io() -> None:
    """Weight, moments and step count stay; tiles of untouched parameters alone are not read."""
    with open_world(Tier.NVME) as world:
        untouched = copy.deepcopy(world.model)
        world.begin(make_step(world.model, {(0, "bias"): 1, (2, "table"): 7}, "bfloat16"))
        assert world.stream.pending_shards == (0, 2)
        world.stream.drain()
        world.assert_right()
        assert differing(world.model, untouched) != []
        for key in ((0, "weight"), (0, "norm"), (1, "weight"), (1, "scale")):
            assert differing({key: world.model[key]}, {key: untouched[key]}) == []
        read = {key for event, key in world.store.events if event == "read begins" and key[0] == "tile"}
        assert read < {("tile", layout.index, tile.index) for layout in world.layouts for tile in layout.tiles}
        assert not any(key[1] == 1 for key in read)


def test_a_load_without_a_pending_update_only_fetches() -> None:
    """Nothing is written and no tile is touched; a resident shard costs nothing at all."""
    with open_world(Tier.NVME) as world:
        for shard in (0, 1, 2, 0):
            buffer = world.visit(shard)
            size = world.layouts[shard].shard_weight_bytes
            stored = world.store.bytes["weights", shard, -1]
            assert torch.equal(buffer.tensor(torch.uint8, size), stored.tensor(torch.uint8, size))
        world.stream.drain()
        assert {event for event, key in world.store.events} == {"read begins", "read ends"}
        assert {key[0] for event, key in world.store.events} == {"weights"}
    with open_world(Tier.CPU) as world:
        world.visit(1)
        assert world.store.events == []


def test_reads_run_ahead_of_the_computation_and_writes_do_not_hold_it_up() -> None:
    """Within and across jobs: the read of the next tile starts before the computation ends; reads begin during writes."""
    with open_world(Tier.NVME, delay_seconds=0.001, num_tile_slots=4, num_weight_slots=3) as world:
        world.begin(world.touch_all())
        leases = [world.slots.lease() for _ in world.layouts]
        loads = [world.stream.load(shard, lease.buffer, fetch=True) for shard, lease in enumerate(leases)]
        for lease, load in zip(leases, loads, strict=True):
            load.wait()
            lease.release_after(load.written)
        world.stream.drain()
        order = [(layout.index, tile.index) for layout in world.layouts for tile in layout.tiles]
        computes = {(span.attributes["shard"], span.attributes["tile"]): span for span in world.spans("update.compute")}
        reads = {(span.attributes["shard"], span.attributes["tile"]): span for span in world.spans("update.read")}
        writes = world.spans("update.write")
        assert sorted(computes, key=lambda where: computes[where].start_ns) == order
        for this, following in itertools.pairwise(order):
            assert reads[following].start_ns < computes[this].end_ns
        assert len(writes) == len(order)
        assert any(write.end_ns > read.start_ns > write.start_ns for write in writes for read in reads.values())
        assert world.store.mixed_directions
        world.assert_right()


def test_burst_never_reads_beside_a_write() -> None:
    """Slots are filled, computed, then written together."""
    with open_world(Tier.NVME, delay_seconds=0.0005, policy=IoPolicy.BURST, num_weight_slots=3) as world:
        for count in (1, 2):
            world.begin(world.touch_all(count))
            for shard in range(3):
                world.visit(shard)
            world.stream.drain()
            world.assert_right()
        assert not world.store.mixed_directions
        tile_events = [event for event, key in world.store.events if key[0] == "tile"]
        assert "write begins,write begins" in ",".join(tile_events)


def test_a_shard_is_read_again_only_after_its_new_weights_are_written() -> None:
    """A second load into another buffer, queued at once, gets the updated weights."""
    for policy in IoPolicy:
        with open_world(Tier.NVME, delay_seconds=0.001, policy=policy) as world:
            world.begin(world.touch_all())
            one, other = world.slots.lease(), world.slots.lease()
            first = world.stream.load(2, one.buffer, fetch=True)
            second = world.stream.load(2, other.buffer, fetch=True)
            second.wait()
            first.written.wait()
            size = world.layouts[2].shard_weight_bytes
            assert torch.equal(one.buffer.tensor(torch.uint8, size), other.buffer.tensor(torch.uint8, size))
            one.release()
            other.release()
            world.stream.drain()
            world.assert_right()


def test_a_second_load_of_a_resident_shard_waits_for_its_update() -> None:
    """Loaded twice while its update runs, both loads end with the new weights in the buffer."""
    placement = [ShardShares(Tier.CPU, Tier.CPU, frozenset()) for _ in range(3)]
    with open_world(placement, delay_seconds=0.002) as world:
        world.begin(world.touch_all())
        buffer = world.store.weights(0)
        assert buffer is not None
        first = world.stream.load(0, buffer, fetch=False)
        second = world.stream.load(0, buffer, fetch=False)
        second.wait()
        assert first.done()
        world.stream.drain()
        world.assert_right()


def test_what_a_step_left_pending_is_updated_with_its_own_step() -> None:
    """`begin` makes the updates that nobody asked for, with the hyper-parameters that they were fixed with."""
    with open_world(Tier.NVME) as world:
        world.begin(world.touch_all(1))
        world.begin(world.touch_all(2))
        world.visit(1)
        world.stream.drain()
        world.assert_right()
