"""Weight slots: what is loaded when, what is put out, and that nothing in use is ever touched (C8)."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import IllegalTransition
from infinity.handles import Ready
from infinity.memory.arena import open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.transfer import open_transfers
from infinity.states import Tier
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.unit_size import undivided
from infinity.telemetry.recorder import Recorder
from infinity.zero.gather import Copy
from infinity.zero.shard import Residency, Shard
from infinity.zero.units import ParameterGroup
from infinity.zero.weights import Slot, Weights

CPU = torch.device("cpu")


@dataclass
class FakeLoad:
    """A load that is done when somebody waits for it, or at once."""

    disk: "Disk"
    shard: int
    buffer: object
    fetch: bool
    update: bool
    finished: bool = False
    written: Ready = field(default_factory=lambda: Ready(None))

    def wait(self):
        if not self.finished:
            self.finished = True
            self.disk.finish(self)

    def done(self):
        return self.finished


class Disk:
    """Every shard's weights: 64 equal numbers, raised by one at each update. Records what happens in order."""

    def __init__(self, num_shards, lazy):
        self.values = [100.0 * shard for shard in range(num_shards)]
        self.due = set()
        self.lazy = lazy
        self.events = []

    def load(self, shard, buffer, fetch):
        self.events.append(("load" if fetch else "update", shard))
        load = FakeLoad(self, shard, buffer, fetch, shard in self.due)
        self.due.discard(shard)
        if not self.lazy:
            load.wait()
        return load

    def finish(self, load):
        flat = load.buffer.tensor(torch.float32, 64)
        if load.fetch:
            flat.fill_(self.values[load.shard])
        if load.update:
            flat.add_(1)
            self.values[load.shard] = float(flat[0])


class Rig:
    """Weights over a fake disk."""

    def __init__(self, num_shards, num_slots, *, lazy=False, kept=()):
        self.disk = Disk(num_shards, lazy)
        shards, slot_bytes = [], 4096
        for index in range(num_shards):
            group = ParameterGroup(index, f"unit{index}", (), (index,))
            layout = shard_layout(index, f"unit{index}", [ParameterSpec("w", (64,), "float32", True)], tile_elements=64)
            shards.append(Shard(group, undivided(layout), Residency.KEPT if index in kept else Residency.ABSENT, {}))
        self.arena = open_arena((num_slots + len(kept)) * slot_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="t", pin=False)
        buffers = [self.arena.buffer.part(n * slot_bytes, slot_bytes) for n in range(num_slots + len(kept))]
        slots = [Slot(buffer, buffer.tensor(torch.uint8, slot_bytes)) for buffer in buffers]
        for shard, slot in zip(kept, slots[num_slots:], strict=True):
            slot.host.tensor(torch.float32, 64).fill_(self.disk.values[shard])
        self.recorder = Recorder()
        self.weights = Weights(
            shards, slots[:num_slots], dict(zip(kept, slots[num_slots:], strict=True)), {}, self.disk.load,
            Copy(open_transfers(CPU)), open_transfers(CPU), self.recorder,
        )  # fmt: skip

    def acquire(self, shard):
        self.disk.events.append(("acquire", shard))
        return self.weights.acquire(shard)["w"]

    def update(self, shards):
        """Begin an update of these shards, and the next step; what the last update left is made first."""
        self.weights.update_now(range(len(self.disk.values)))
        self.disk.due |= set(shards)
        self.weights.updates_are_due(shards)
        self.weights.rewind()

    def num_loads(self):
        return self.recorder.counters().get("unit_loads", 0)


@st.composite
def _walks(draw):
    """Draw an order of visits, and asks that follow it more or less, some of them nested."""
    num_shards = draw(st.integers(3, 6))
    visit = st.lists(st.integers(0, num_shards - 1), min_size=1, max_size=2, unique=True).map(tuple)
    order = tuple(draw(st.lists(visit, min_size=1, max_size=10)))
    asks = draw(st.lists(st.one_of(st.sampled_from(order), visit, st.just("update")), min_size=1, max_size=25))
    return num_shards, order, asks


@settings(max_examples=150, deadline=None)
@given(_walks(), st.integers(2, 4), st.booleans())
def test_any_order_ends_with_two_slots(walk, num_slots, lazy):
    """Whatever is asked for, in whatever order, two slots do for visits of two shards: the values are right and stay."""
    num_shards, order, asks = walk
    rig = Rig(num_shards, num_slots, lazy=lazy)
    expected = [100.0 * shard for shard in range(num_shards)]
    rig.weights.expect(order)
    for ask in asks:
        if ask == "update":
            rig.update(range(num_shards))
            expected = [value + 1 for value in expected]
            continue
        held = []
        for shard in ask:
            held.append((shard, rig.acquire(shard)))
            for known, weight in held:
                assert weight.tolist() == [expected[known]] * 64
        for shard in ask:
            rig.weights.release(shard)
    rig.weights.update_now(range(num_shards))
    rig.weights.settle()
    assert rig.disk.values == expected


def _vertical(units):
    return tuple((unit,) for unit in (*units, *reversed(units[:-1])))


def test_the_next_units_are_loaded_ahead():
    """While a unit is in use the next one in the order is on its way already."""
    rig = Rig(6, 3)
    rig.weights.expect(_vertical(range(6)))
    for (shard,) in _vertical(range(6)):
        rig.acquire(shard)
        rig.weights.release(shard)
    events = rig.disk.events
    for place, event in enumerate(events):
        if event[0] == "acquire":
            assert ("load", event[1]) in events[:place]
    first = {shard: events.index(("load", shard)) for shard in range(6)}
    for shard in range(2, 6):
        assert first[shard] < events.index(("acquire", shard - 1))


def test_the_turn_costs_no_load():
    """At the turn from forward to backward what the slots still hold is used again."""
    rig = Rig(8, 3)
    order = _vertical(range(8))
    rig.weights.expect(order)
    for _ in range(3):
        before = rig.num_loads()
        for (shard,) in order:
            rig.acquire(shard)
            rig.weights.release(shard)
        rig.weights.rewind()
    assert rig.num_loads() - before <= len(order) - 1


@pytest.mark.parametrize("num_micro_batches", [1, 4, 16])
@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_loads_do_not_depend_on_the_number_of_micro_batches(num_micro_batches, num_slots):
    """Each visit is served by at most one load, however many micro-batches ask; units with a shared part included."""
    rig = Rig(9, num_slots)
    units = [(0,), (1, 8), (2, 8), (3, 8), (4, 8), (5,)]
    order = (*units, *reversed(units[:-1]))
    rig.weights.expect(order)
    for step in range(2):
        before = rig.num_loads()
        for visit in order:
            for _ in range(num_micro_batches):
                for shard in visit:
                    rig.acquire(shard)
                for shard in visit:
                    rig.weights.release(shard)
        rig.update(range(6))
        if step:
            assert rig.num_loads() - before <= sum(len(visit) for visit in order)


def test_the_cursor_stays_at_a_visit_of_two_shards():
    """Asking for both shards of a visit again and again does not take the order for farther on than it is."""
    rig = Rig(5, 4)
    order = ((0, 4), (1, 4), (2, 4), (1, 4), (0, 4))
    rig.weights.expect(order)
    for _ in range(4):
        for shard in (0, 4):
            rig.acquire(shard)
        for shard in (0, 4):
            rig.weights.release(shard)
    assert rig.num_loads() <= 4
    assert ("load", 1) in rig.disk.events


def test_all_slots_in_use_is_an_error():
    """More shards at once than slots cannot be served; the error names the shard and the remedy."""
    rig = Rig(3, 2)
    rig.acquire(0)
    rig.acquire(1)
    with pytest.raises(IllegalTransition, match="All 2 weight slots are in use while unit2 is needed") as caught:
        rig.acquire(2)
    assert "weight_slots" in caught.value.remedy


def test_loading_ahead_puts_nothing_out_that_is_in_use():
    """A slot whose weights are held keeps them, whatever comes next in the order."""
    rig = Rig(5, 2)
    rig.weights.expect(tuple((shard,) for shard in range(5)))
    weight = rig.acquire(0)
    for shard in (1, 2, 3, 4):
        rig.acquire(shard)
        rig.weights.release(shard)
        assert weight.tolist() == [0.0] * 64


def test_updates_come_in_the_order_of_use():
    """After a step the updates are made along the order, each before its unit is asked for, kept units included."""
    rig = Rig(4, 2, kept=(1,))
    order = ((0,), (1,), (2,), (3,))
    rig.weights.expect(order)
    for (shard,) in order:
        rig.acquire(shard)
        rig.weights.release(shard)
    rig.disk.events.clear()
    rig.update(range(4))
    for (shard,) in order:
        assert rig.acquire(shard).tolist() == [100.0 * shard + 1] * 64
        rig.weights.release(shard)
    made = [shard for kind, shard in rig.disk.events if kind != "acquire"]
    assert made[:4] == [0, 1, 2, 3]


def test_bytes_in_a_slot_are_updated_where_they_are():
    """A shard that still lies in a slot when its update begins is not fetched again."""
    rig = Rig(2, 2)
    rig.weights.expect(((0,), (1,)))
    for shard in (0, 1):
        rig.acquire(shard)
        rig.weights.release(shard)
    loads = rig.num_loads()
    rig.update([0, 1])
    for shard in (0, 1):
        assert rig.acquire(shard).tolist() == [100.0 * shard + 1] * 64
        rig.weights.release(shard)
    assert rig.num_loads() == loads


def test_an_update_while_weights_are_in_use_is_an_error():
    """The state machine says so before anything happens."""
    rig = Rig(2, 2)
    rig.acquire(0)
    with pytest.raises(IllegalTransition, match="in use while an update begins"):
        rig.weights.updates_are_due([0])


def test_forgotten_weights_are_fetched_again():
    """After the bytes on the disk were changed from outside nothing stale is given out."""
    rig = Rig(3, 3)
    rig.weights.expect(((0,), (1,), (2,)))
    rig.acquire(1)
    rig.weights.release(1)
    rig.weights.forget()
    rig.disk.values = [7.0, 8.0, 9.0]
    for shard in range(3):
        assert rig.acquire(shard).tolist() == [7.0 + shard] * 64
        rig.weights.release(shard)
