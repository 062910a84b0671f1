"""Gathered weights: which shards are in the slots now, which come next, and who may be put out.

A shard whose weights are absent is loaded into a *slot* for a visit. The schedule says in which order shards will be asked
for (`expect`); free slots are filled ahead along that order, and the shard whose next use is farthest is put out first
(Belady, 1966), so the turn from forward to backward costs no load for the shards that are still there. Loading may include
the update of the shard: that is the loader's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from infinity.errors import IllegalTransition
from infinity.handles import Handle
from infinity.memory.pool import Buffer
from infinity.memory.transfer import Transfers
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder
from infinity.zero.shard import Residency, Shard


class Load(Protocol):
    """A load in progress: `wait` returns when the weights in the buffer are the new ones."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...

    @property
    def written(self) -> Handle[None]:
        """Done when nothing reads the buffer any more, so that it may be filled with something else."""
        ...


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
    """Room for the weights of one shard. Without a separate compute device `device` is the host buffer itself."""

    host: Buffer
    device: torch.Tensor  # uint8 [slot bytes] on the compute device
    shard: int | None = None  # whose bytes it holds, if any
    load: Load | None = None  # the last load into it


class Weights:
    """Gives units their weights. Owner: the engine. One thread. After an error of a load the step is lost."""

    def __init__(
        self, shards: Sequence[Shard], slots: Sequence[Slot], kept: Mapping[int, Slot], loader: Loader, transfers: Transfers,
        recorder: Recorder,
    ) -> None:  # fmt: skip
        self._shards = shards
        self._slots = list(slots)
        self._kept = dict(kept)  # the slots of shards whose weights stay: never put out
        self._loader = loader
        self._transfers = transfers
        self._recorder = recorder
        self._states = {shard.index: Lifecycle(f"weights of {shard.layout.name}", WeightState.SHARDED, _MOVES) for shard in shards}
        self._in_use = [0] * len(shards)
        self._update_is_due = [False] * len(shards)
        self._order: tuple[int, ...] = ()
        self._cursor = 0
        self._num_started_kept = 0

    def expect(self, order: Sequence[int]) -> None:
        """Say in which order shards will be asked for, from now on and again and again."""
        self._order = tuple(order)
        self._cursor = 0
        self._load_ahead()

    def updates_are_due(self, shards: Sequence[int]) -> None:
        """A step was taken: the next load of each of these shards brings new weights. Nothing may be in use."""
        for shard in shards:
            if self._in_use[shard]:
                raise IllegalTransition(f"Weights of {self._shards[shard].layout.name} are in use while an update begins.")
            self._update_is_due[shard] = True
            if self._states[shard].state is WeightState.READY:
                self._states[shard].to(WeightState.SHARDED)

    def acquire(self, shard: int) -> Mapping[str, torch.Tensor]:
        """Return the shard's parameters, ready on the compute device; they stay until `release`."""
        self._advance(shard)
        slot = self._slot_of(shard) or self._start(shard)
        self._make_ready(shard, slot)
        self._in_use[shard] += 1
        self._load_ahead()
        return self._shards[shard].views(slot.device)

    def release(self, shard: int) -> None:
        """The caller uses the weights no more."""
        self._in_use[shard] -= 1
        self._load_ahead()

    def settle(self) -> None:
        """Wait until every load that was begun has ended and been written."""
        for shard in self._shards:
            slot = self._slot_of(shard.index)
            if slot is not None:
                self._make_ready(shard.index, slot)
        for slot in (*self._slots, *self._kept.values()):
            if slot.load is not None:
                slot.load.written.wait()

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
        if fetch or self._update_is_due[shard]:
            slot.load = self._loader(shard, slot.host, fetch)
        self._update_is_due[shard] = False
        return slot

    def _put_out(self, slot: Slot) -> None:
        if slot.load is not None:
            slot.load.written.wait()
        if slot.shard is not None and self._states[slot.shard].state is WeightState.READY:
            self._states[slot.shard].to(WeightState.SHARDED)
        slot.shard = None
        slot.load = None

    def _make_ready(self, shard: int, slot: Slot) -> None:
        state = self._states[shard]
        if state.state is WeightState.READY:
            return
        if slot.load is not None:
            slot.load.wait()
        state.to(WeightState.GATHERING)
        self._transfers.to_device(slot.host.tensor(torch.uint8, slot.host.num_bytes), slot.device).wait()
        state.to(WeightState.READY)

    # Order

    def _advance(self, shard: int) -> None:
        """Move the cursor to the next place of the order that names the shard; a surprise leaves it where it is."""
        for step in range(len(self._order)):
            position = (self._cursor + step) % len(self._order)
            if self._order[position] == shard:
                self._cursor = position
                return

    def _next_use(self, shard: int) -> int:
        """Return how many places of the order lie before the next use of the shard."""
        for step in range(len(self._order)):
            if self._order[(self._cursor + step) % len(self._order)] == shard:
                return step
        return len(self._order)

    def _choose(self, shard: int, *, needed_at: int, must: bool) -> Slot | None:
        """Return the slot to load the shard into, or nothing if every other shard is needed sooner."""
        same = next((slot for slot in self._slots if slot.shard == shard), None)
        if same is not None:
            return same
        free = [slot for slot in self._slots if slot.shard is None]
        if free:
            return free[0]
        idle = [slot for slot in self._slots if slot.shard is not None and self._may_go(slot.shard)]
        if not must:  # loading ahead never waits for a write
            idle = [slot for slot in idle if slot.load is None or slot.load.written.done()]
        if not idle:
            return None
        farthest = max(idle, key=lambda slot: self._next_use(slot.shard if slot.shard is not None else shard))
        distance = self._next_use(farthest.shard if farthest.shard is not None else shard)
        return farthest if must or distance > needed_at - self._cursor else None

    def _may_go(self, shard: int) -> bool:
        return self._in_use[shard] == 0 and self._states[shard].state in (WeightState.READY, WeightState.SHARDED)

    def _load_ahead(self) -> None:
        """Begin to load what comes next in the order, as far as there are slots for it."""
        for step in range(1, len(self._order)):
            position = self._cursor + step
            shard = self._order[position % len(self._order)]
            if self._slot_of(shard) is not None:
                continue
            if self._shards[shard].residency is not Residency.ABSENT:
                self._begin(shard, self._kept[shard], fetch=False)
                continue
            slot = self._choose(shard, needed_at=position, must=False)
            if slot is None:
                return
            self._begin(shard, slot, fetch=slot.shard != shard)
