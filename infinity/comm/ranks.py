"""The group of several ranks: checks, order and byte counts in one place, over the collectives of one backend."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING

from torch import Tensor

from infinity.comm.beats import RankState
from infinity.comm.collectives import Collectives
from infinity.comm.group import Json, own_shard, require_flat, require_shards, require_summable
from infinity.comm.line import Line, Peers
from infinity.comm.order import Entry, Order
from infinity.comm.watch import Watch
from infinity.errors import CommError, InfinityError
from infinity.handles import Handle
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder

if TYPE_CHECKING:  # one rank needs no build of torch that has it
    from torch.distributed.distributed_c10d import Store

_LENGTH_BYTES = 8


class GroupState(Enum):
    """OPEN: takes calls. FAILED: this rank said that it cannot go on. CLOSED: met the others and ended."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


GROUP_MOVES = {
    GroupState.OPEN: (GroupState.FAILED, GroupState.CLOSED),
    GroupState.FAILED: (),
    GroupState.CLOSED: (),
}


class RankGroup:
    """`Group` over several ranks. Its opener ends it: with `close`, or with `fail` when this rank has an error of its own.

    Counts `all_gather_bytes`, `reduce_scatter_bytes` and `broadcast_bytes` in the recorder: (N - 1) / N of the flat buffer,
    which is what each rank sends and receives; an all_reduce counts as the two that it is made of.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        line: Line,
        words: Line,
        peers: Peers,
        order: Order,
        watch: Watch,
        recorder: Recorder,
        keep: Store,
    ) -> None:
        self.rank = peers.rank
        self.size = peers.size
        self.backend = collectives.backend
        self._collectives = collectives
        self._line = line
        self._words = words  # for small values, which do not wait for data that waits for a disk
        self._peers = peers  # of that line
        self._order = order
        self._watch = watch
        self._recorder = recorder
        self._keep = keep  # where this rank hosts the store, it lives as long as this object
        self._lifecycle = Lifecycle("Process group", GroupState.OPEN, GROUP_MOVES)

    def begin_step(self, step: int) -> None:
        self._order.begin_step(step)

    def all_gather(self, shard: Tensor, into: Tensor, *, what: str, after: Handle[None] | None = None) -> Handle[None]:
        require_shards(shard, into, self.size, what)
        self._count("all_gather_bytes", into)
        return self._collectives.all_gather(self._admit("all_gather", into, what), shard, into, after)

    def reduce_scatter(self, flat: Tensor, into: Tensor, *, what: str) -> Handle[None]:
        require_shards(into, flat, self.size, what)
        require_summable(flat, what)
        self._count("reduce_scatter_bytes", flat)
        return self._collectives.reduce_scatter(self._admit("reduce_scatter", flat, what), flat, into)

    def all_reduce(self, flat: Tensor, *, what: str) -> Handle[None]:
        own = own_shard(flat, self.rank, self.size, what)
        require_summable(flat, what)
        self._count("reduce_scatter_bytes", flat)
        self._count("all_gather_bytes", flat)
        return self._collectives.all_reduce(self._admit("all_reduce", flat, what), flat, own)

    def broadcast(self, flat: Tensor, *, source: int, what: str) -> Handle[None]:
        require_flat(flat, what)
        self._count("broadcast_bytes", flat)
        return self._collectives.broadcast(self._admit(f"broadcast from rank {source}", flat, what), flat, source)

    def gather(self, value: Json, *, what: str) -> list[Json]:
        mine = json.dumps(value).encode()

        def exchange() -> list[bytes]:
            packed = self._peers.exchange_bytes(len(mine).to_bytes(_LENGTH_BYTES, "little"), [_LENGTH_BYTES] * self.size)
            return self._peers.exchange_bytes(mine, [int.from_bytes(length, "little") for length in packed])

        return [json.loads(theirs) for theirs in self._words.submit(self._order.add(f"gather of {what}"), exchange).wait()]

    def fail(self, reason: str) -> None:
        if self._lifecycle.state is not GroupState.OPEN:
            return
        self._lifecycle.to(GroupState.FAILED)
        self._end(RankState.FAILED, reason)

    def close(self) -> None:
        if self._lifecycle.state is not GroupState.OPEN:
            return
        try:
            self.gather(None, what="the end")
        except CommError as error:
            self.fail(error.message)
            raise
        self._lifecycle.to(GroupState.CLOSED)
        self._end(RankState.CLOSED, "")

    def end_by(self, error: InfinityError) -> None:
        """The watch's verdict: every handle gets `error`, and every later call raises it. Any thread."""
        self._line.fail(error)
        self._words.fail(error)
        self._collectives.fail(error)

    def _end(self, state: RankState, why: str) -> None:
        self._watch.end(state, why)
        if state is RankState.FAILED:
            self.end_by(CommError(f"Rank {self.rank} failed: {why}", remedy="The cause is there."))
        self._line.close()
        self._words.close()
        self._collectives.close()

    def _count(self, name: str, flat: Tensor) -> None:
        self._recorder.count(name, flat.numel() * flat.element_size() * (self.size - 1) // self.size)

    def _admit(self, collective: str, flat: Tensor, what: str) -> Entry:
        if flat.device.type != self._collectives.device_type:
            raise CommError(
                f"{what}: {self.backend} moves buffers on {self._collectives.device_type}; this one is on {flat.device}.",
                remedy="Open the group for the device that holds the buffers.",
            )
        return self._order.add(f"{collective} of {what} ({flat.numel()} x {str(flat.dtype).removeprefix('torch.')})")
