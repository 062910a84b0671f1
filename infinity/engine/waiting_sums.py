"""Sums that wait between micro-batches: where the plan put them, in RAM or on NVMe, and booked either way.

Sums in RAM stay where they are. Spilled ones come into a gradient slot when a unit's backward adds to them, one shard's at a
time, and are written when it is over, beside what is computed next. Sums that the plan does not know of (the familiar loop
under a plan for vertical order, a unit called more often than its name says) get memory of their own if the ledger has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from infinity.errors import IllegalTransition, OverBudget
from infinity.handles import AllOf, Handle
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, Lease
from infinity.placement.plan import Owner
from infinity.states import Tier
from infinity.store.extents import sum_bytes
from infinity.store.layout import ShardLayout
from infinity.store.store import Store

# Takes a shard's total, its touched parameters, and the lease of the slot that the total is in, if any: to be given back.
PublishTotal = Callable[[int, torch.Tensor, frozenset[str], Lease | None], None]


@dataclass(slots=True)
class _Held:
    """The slot with one shard's spilled sums, each at its own offset."""

    shard: int
    lease: Lease
    numbers: set[int] = field(default_factory=set)  # those that are there


class WaitingSums:
    """The place of sums that outlast a micro-batch (zero's SumsPlace). One thread. Its opener closes it.

    Raises StorageError, and OverBudget for sums that the plan does not know of.
    """

    def __init__(
        self,
        *,
        store: Store,
        layouts: Sequence[ShardLayout],
        num_sums: Mapping[int, int],
        slots: BufferPool | None,
        publish: PublishTotal,
        update_now: Callable[[Sequence[int]], None],
        ledger: Ledger,
    ) -> None:
        self._store = store
        self._layouts = layouts  # of the sums: the whole unit, or this rank's part
        self._num_sums = num_sums  # by shard: those that the plan knows of
        self._slots = slots
        self._publish = publish
        self._update_now = update_now
        self._ledger = ledger
        self._held: _Held | None = None
        self._unplanned: dict[tuple[int, int], Buffer] = {}  # by (shard, number); kept for the steps to come
        self._resources = ExitStack()

    def at(self, shard: int, number: int, *, fresh: bool) -> torch.Tensor:
        """Return the sum, fp32 [num_state_elements] in host memory; see SumsPlace."""
        if fresh:
            self._update_now([shard])  # the last step's gradient may still be there where its unit was not called since
        return self._buffer(shard, number, fresh).tensor(torch.float32, self._layouts[shard].num_state_elements)

    def leave(self, shard: int) -> None:
        """Write the shard's sums if they are spilled."""
        if self._held is not None and self._held.shard == shard:
            self._let_go()

    def publish(self, shard: int, total: torch.Tensor, touched: frozenset[str]) -> None:
        """Round the total to the finished gradient, in the place where that waits for the update."""
        lease = None
        if self._held is not None and self._held.shard == shard:
            lease, self._held = self._held.lease, None
        self._publish(shard, total, touched, lease)

    def discard(self) -> None:
        """Give the slot back; what is in it is worth nothing."""
        held, self._held = self._held, None
        if held is not None:
            held.lease.release()

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        self.discard()
        self._unplanned.clear()
        self._resources.close()

    def _buffer(self, shard: int, number: int, fresh: bool) -> Buffer:
        num_bytes = sum_bytes(self._layouts[shard])
        if number >= self._num_sums[shard]:
            return self._unplanned.get((shard, number)) or self._open_unplanned(shard, number, num_bytes)
        waiting = self._store.gradients(shard)
        if waiting is not None:
            return waiting.part(number * num_bytes, num_bytes)
        held = self._hold(shard)
        part = held.lease.buffer.part(number * num_bytes, num_bytes)
        if number not in held.numbers:
            if not fresh:
                self._store.fetch_sum(shard, number, part).wait()
            held.numbers.add(number)
        return part

    def _hold(self, shard: int) -> _Held:
        if self._held is not None and self._held.shard == shard:
            return self._held
        self._let_go()
        if self._slots is None:
            raise IllegalTransition(f"The sums of {self._layouts[shard].name} are on NVMe, but there are no gradient slots.")
        self._held = _Held(shard, self._slots.lease())
        return self._held

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        num_bytes = sum_bytes(self._layouts[held.shard])
        writes: list[Handle[None]] = []
        try:
            for number in sorted(held.numbers):
                part = held.lease.buffer.part(number * num_bytes, num_bytes)
                writes.append(self._store.publish_sum(held.shard, number, part))
        finally:  # also where an earlier write of the same sums has failed
            held.lease.release_after(AllOf(writes))

    def _open_unplanned(self, shard: int, number: int, num_bytes: int) -> Buffer:
        try:
            arena = open_arena(num_bytes, ledger=self._ledger, tier=Tier.CPU, owner=Owner.ACCUMULATORS.value, pin=False)
        except OverBudget as error:
            raise OverBudget(
                f"There is no room for a sum of {self._layouts[shard].name} between micro-batches: {error.message}",
                remedy='Set infinity.schedule to "horizontal", so that the plan has room for sums, or call train_batch.',
            ) from error
        self._unplanned[shard, number] = self._resources.enter_context(arena).buffer
        return self._unplanned[shard, number]
