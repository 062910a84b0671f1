"""Gathered weights: which shards are in the slots now, which come next, and who may be put out.

A shard whose weights are absent is loaded into a *slot* for a visit. The schedule says in which order shards will be asked
for (`expect`); free slots are filled ahead along that order, and the shard whose next use is farthest is put out first
(Belady, 1966), so the turn from forward to backward costs no load for the shards that are still there. Loading may include
the update of the shard: that is the loader's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from infinity.errors import IllegalTransition
from infinity.memory.arena import Buffer
from infinity.memory.transfer import Mark, Transfers, Upload
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder
from infinity.zero.gather import Gather, Load
from infinity.zero.order import ShardOrder
from infinity.zero.shard import Residency, Shard

# (shard, buffer, fetch): fill the buffer with the shard's newest weights; without `fetch` it holds the last ones already.
Loader = Callable[[int, Buffer, bool], Load]


class WeightState(Enum):
    """Where a shard's weights are on their way to its unit."""

    SHARDED = "sharded"  # on their own tier only
    FETCHING = "fetching"  # coming into a slot; the slot pays
    GATHERING = "gathering"  # from the slot to the compute device and from the other ranks
    READY = "ready"  # the unit may run


_MOVES = {
    WeightState.SHARDED: (WeightState.FETCHING,),
    WeightState.FETCHING: (WeightState.GATHERING,),
    WeightState.GATHERING: (WeightState.READY,),
    WeightState.READY: (WeightState.SHARDED,),
}


@dataclass(slots=True)
class Slot:
    """Room for the weights of one shard. Where the host's memory is the compute device's, `device` is the host buffer."""

    host: Buffer
    device: torch.Tensor  # uint8 [slot bytes] on the compute device
    shard: int | None = None  # whose bytes it holds, if any
    load: Load | None = None  # the last load into it
    source: Buffer | None = None  # where that load put the weights: `host`, or the shard's own place in host memory
    upload: Upload | None = None  # the last copy to the device
    last_use: Mark | None = None  # the point in the compute stream up to which `device` was used


class Weights:
    """Gives units their weights. Owner: the engine. One thread. After an error of a load the step is lost."""

    def __init__(
        self, shards: Sequence[Shard], slots: Sequence[Slot], kept: Mapping[int, Slot], in_host_memory: Mapping[int, Buffer],
        loader: Loader, gather: Gather, transfers: Transfers, recorder: Recorder,
    ) -> None:  # fmt: skip
        self._shards = shards
        self._slots = list(slots)
        self._kept = dict(kept)  # the slots of shards whose weights stay: never put out
        self._in_host_memory = dict(in_host_memory)  # weights that stay in host memory: loaded and updated where they are
        self._loader = loader
        self._gather = gather
        self._transfers = transfers
        self._recorder = recorder
        self._states = {
            shard.index: Lifecycle(f"weights of {shard.layout.name}", WeightState.SHARDED, _MOVES) for shard in shards
        }
        self._in_use = [0] * len(shards)
        self._update_is_due = [False] * len(shards)
        self._update_is_begun = [False] * len(shards)  # ahead, and nobody has waited for the new weights yet
        self._order: ShardOrder = ()
        self._cursor = 0  # the visit that is being served

    def expect(self, order: ShardOrder) -> None:
        """Say in which order shards will be asked for, visit by visit, from now on and again and again."""
        self._order = order
        self.rewind()

    def rewind(self) -> None:
        """A step begins: what the order names first is asked for next."""
        self._cursor = 0
        self._load_ahead()

    def update_now(self, shards: Sequence[int]) -> None:
        """Make the updates that are due for these shards and wait until their weights are new."""
        for shard in shards:
            if self._update_is_due[shard] or self._update_is_begun[shard]:
                self.acquire(shard)
                self.release(shard)

    def updates_are_due(self, shards: Sequence[int]) -> None:
        """A step was taken: the next load of each of these shards brings new weights. Nothing may be in use."""
        end_of_step = self._transfers.mark()
        for kept in self._kept.values():  # backward uses them after their release
            kept.last_use = end_of_step
        for shard in shards:
            if self._in_use[shard]:
                raise IllegalTransition(f"Weights of {self._shards[shard].layout.name} are in use while an update begins.")
            self._update_is_due[shard] = True
            slot = self._slot_of(shard)
            if slot is not None:  # its old bytes are there, or on their way: the update will find them
                self._make_ready(shard, slot)
                self._states[shard].to(WeightState.SHARDED)
        self._begin_kept(shards)

    def acquire(self, shard: int) -> Mapping[str, torch.Tensor]:
        """Return the shard's parameters, ready on the compute device; they stay until `release`."""
        self._advance(shard)
        slot = self._slot_of(shard) or self._start(shard)
        self._make_ready(shard, slot)
        if slot.upload is not None:
            self._await(shard, slot.upload)  # also where another stream computes than the one that waited for it first
        self._update_is_begun[shard] = False
        self._in_use[shard] += 1
        self._load_ahead()
        return self._shards[shard].views(slot.device)

    def release(self, shard: int) -> None:
        """The caller uses the weights no more."""
        self._in_use[shard] -= 1
        slot = self._slot_of(shard)
        if slot is not None:
            slot.last_use = self._transfers.mark()
        self._load_ahead()

    def show_resident(self) -> None:
        """Bring the weights of resident shards into the parameters that the modules hold."""
        self._begin_kept(self._kept)
        for shard in self._shards:
            if shard.residency is Residency.RESIDENT:
                self.acquire(shard.index)
                self.release(shard.index)

    def settle(self) -> None:
        """Wait until every load that was begun has ended and been written, and every host buffer may be changed."""
        for shard in self._shards:
            slot = self._slot_of(shard.index)
            if slot is not None:
                self._make_ready(shard.index, slot)
        for slot in (*self._slots, *self._kept.values()):
            if slot.load is not None:
                slot.load.written.wait()
            if slot.upload is not None:
                slot.upload.source_free.wait()

    def forget(self) -> None:
        """Put every shard out of the slots: the bytes on their own tiers have been changed from outside."""
        self.settle()
        for shard in self._shards:
            if self._states[shard.index].state is WeightState.READY:
                self._states[shard.index].to(WeightState.SHARDED)
            if shard.index in self._kept:
                self._kept[shard.index].load = None
        for slot in self._slots:
            slot.shard = None
            slot.load = None
        for slot in (*self._slots, *self._kept.values()):
            slot.last_use = self._transfers.mark()

    def _begin_kept(self, shards: Iterable[int]) -> None:
        """Over several ranks: begin those that stay, in an order that does not depend on this rank's way."""
        if self._gather.is_collective:
            for shard in sorted(set(shards) & set(self._kept)):
                if self._states[shard].state is WeightState.SHARDED:
                    self._begin(shard, self._kept[shard], fetch=False)

    # Slots

    def _slot_of(self, shard: int) -> Slot | None:
        """Return the slot where the shard is ready or on its way, or nothing."""
        if self._states[shard].state is WeightState.SHARDED:
            return None
        return self._kept.get(shard) or next((slot for slot in self._slots if slot.shard == shard), None)

    def _start(self, shard: int) -> Slot:
        """Begin to load the shard because it is needed now."""
        kept = self._kept.get(shard)
        if kept is not None:
            return self._begin(shard, kept, fetch=False)
        slot = self._choose(shard, needed_at=self._cursor, must=True)
        if slot is None:
            raise IllegalTransition(
                f"All {len(self._slots)} weight slots are in use while {self._shards[shard].layout.name} is needed.",
                remedy="Raise infinity.weight_slots or the memory budget.",
            )
        return self._begin(shard, slot, fetch=slot.shard != shard)

    def _begin(self, shard: int, slot: Slot, *, fetch: bool) -> Slot:
        state = self._states[shard]
        if fetch:
            self._put_out(slot)
            self._recorder.count("unit_loads", 1)
        slot.shard = shard
        state.to(WeightState.FETCHING)
        if slot.upload is not None:
            slot.upload.source_free.wait()
        slot.source = self._in_host_memory.get(shard, slot.host)
        if fetch or self._update_is_due[shard]:
            slot.load = self._loader(shard, slot.source, fetch and slot.source is slot.host)
        self._update_is_begun[shard] = self._update_is_begun[shard] or self._update_is_due[shard]
        self._update_is_due[shard] = False
        if self._gather.is_collective:  # at a point of this rank's order of work, not of time
            self._begin_gather(shard, slot)
        return slot

    def _put_out(self, slot: Slot) -> None:
        if slot.load is not None:
            slot.load.written.wait()
        if slot.shard is not None:
            self._update_is_begun[slot.shard] = False
        if slot.shard is not None and self._states[slot.shard].state is WeightState.READY:
            self._states[slot.shard].to(WeightState.SHARDED)
        slot.shard = None
        slot.load = None

    def _make_ready(self, shard: int, slot: Slot) -> None:
        state = self._states[shard]
        if state.state is WeightState.FETCHING:
            self._begin_gather(shard, slot)
        if state.state is WeightState.GATHERING:
            state.to(WeightState.READY)

    def _begin_gather(self, shard: int, slot: Slot) -> None:
        """Begin to bring what was loaded to the compute device, behind the slot's last use there."""
        if slot.load is not None and not self._gather.is_collective:
            with self._recorder.span("weights.wait", unit=self._shards[shard].layout.name):
                slot.load.wait()
        self._states[shard].to(WeightState.GATHERING)
        source = slot.source or slot.host
        slot.upload = self._gather.begin(self._shards[shard], source, slot.device, slot.load, slot.last_use)

    def _await(self, shard: int, upload: Upload) -> None:
        """Let what is computed from now on see the weights."""
        if self._gather.is_collective:
            with self._recorder.span("weights.wait", unit=self._shards[shard].layout.name):
                upload.wait()
        else:
            upload.wait()  # the load was waited for

    # Order

    def _advance(self, shard: int) -> None:
        """Move the cursor to the next visit that needs the shard; a surprise leaves it where it is."""
        distance = self._next_use(shard)
        if distance < len(self._order):
            self._cursor = (self._cursor + distance) % len(self._order)

    def _next_use(self, shard: int) -> int:
        """Return how many visits lie before the next one that needs the shard; the length of the order if none does."""
        order, cursor = self._order, self._cursor
        for distance in range(len(order)):
            if shard in order[(cursor + distance) % len(order)]:
                return distance
        return len(order)

    def _choose(self, shard: int, *, needed_at: int, must: bool) -> Slot | None:
        """Return the slot to load the shard into, or nothing if every other shard is in use or needed sooner."""
        same = next((slot for slot in self._slots if slot.shard == shard), None)
        if same is not None:
            return same
        idle = [slot for slot in self._slots if slot.shard is None or not self._in_use[slot.shard]]
        if not must and not self._gather.is_collective:  # loading ahead waits for nothing but to keep ranks in one order
            idle = [slot for slot in idle if _is_settled(slot)]
        if not idle:
            return None
        farthest = max(idle, key=self._distance)
        if not must and self._distance(farthest) <= needed_at - self._cursor:
            return None
        if farthest.shard is not None and self._slot_of(farthest.shard) is not None:
            self._make_ready(farthest.shard, farthest)  # it may have been loaded ahead in vain
        return farthest

    def _distance(self, slot: Slot) -> int:
        """Return how far the next use of what the slot holds is; an empty slot is the first choice."""
        return len(self._order) + 1 if slot.shard is None else self._next_use(slot.shard)

    def _load_ahead(self) -> None:
        """Begin to load what this visit and the next ones need, and to copy to the device what has been loaded."""
        self._begin_ahead()
        for shard, state in self._states.items():
            if state.state is WeightState.FETCHING:
                slot = self._slot_of(shard)
                if slot is not None and (slot.load is None or slot.load.done()):
                    self._begin_gather(shard, slot)

    def _begin_ahead(self) -> None:
        """Begin to load in the order of visits, as far as there are slots."""
        for distance in range(len(self._order)):
            position = self._cursor + distance
            for shard in self._order[position % len(self._order)]:
                if self._slot_of(shard) is not None:
                    continue
                if self._shards[shard].residency is not Residency.ABSENT:
                    self._begin(shard, self._kept[shard], fetch=False)
                    continue
                slot = self._choose(shard, needed_at=position, must=False)
                if slot is None:
                    return
                self._begin(shard, slot, fetch=slot.shard != shard)


def _is_settled(slot: Slot) -> bool:
    """Return whether a slot can be filled with something else without waiting."""
    loaded = slot.load is None or (slot.load.done() and slot.load.written.done())
    return loaded and (slot.upload is None or slot.upload.source_free.done())
