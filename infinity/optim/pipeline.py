"""The pipeline of the update stream: which read, computation or write comes next. It belongs to one thread.

Jobs are taken in the order in which they were admitted and so are their tiles. Tiles are read ahead, across jobs, as far as
there are slots; a slot is taken from the start of a tile's read to the end of its write. Writes are only begun here, never
waited for, except where nothing else can move.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from infinity.errors import IllegalTransition, InfinityError
from infinity.handles import AllOf, Handle, Ready
from infinity.memory.arena import Buffer
from infinity.memory.pool import BufferPool, Lease
from infinity.optim.hyper import UpdateStep
from infinity.optim.kernel import AdamKernel
from infinity.optim.load import Load
from infinity.optim.tile_update import UpdateState, compute_tile, update_lifecycle
from infinity.states import Lifecycle
from infinity.store.extents import gradient_window
from infinity.store.layout import ELEMENT_BYTES, ShardLayout, Tile
from infinity.store.tiles import TileLease
from infinity.telemetry.recorder import Recorder


class UpdateStore(Protocol):
    """What the stream needs of the store."""

    @property
    def num_tile_slots(self) -> int: ...
    def fetch_tile(self, tile: Tile) -> Handle[TileLease]: ...
    def publish_tile(self, tile: Tile, lease: TileLease) -> Handle[None]: ...
    def weights(self, shard: int) -> Buffer | None: ...
    def fetch_weights(self, shard: int, into: Buffer) -> Handle[None]: ...
    def publish_weights(self, shard: int, source: Buffer) -> Handle[None]: ...
    def gradients(self, shard: int) -> Buffer | None: ...
    def fetch_gradients(self, tile: Tile, into: Buffer) -> Handle[None]: ...


class IoPolicy(str, Enum):
    """How reads and writes share the disk."""

    MIXED = "mixed"  # they flow together
    BURST = "burst"  # never at one time: read until the slots are full, compute, write them all


_READS_BESIDE_WRITES = {IoPolicy.MIXED: True, IoPolicy.BURST: False}


@dataclass(slots=True)
class Job:
    """A load: fetch the weights, update the tiles, write the weights; each only where there is something to do."""

    layout: ShardLayout
    weights: Buffer
    fetch: bool
    step: UpdateStep | None  # None: no update
    tiles: Sequence[Tile]
    load: Load = field(default_factory=Load)
    before: Load | None = None  # the load of the same shard before this one
    fetched: Handle[None] | None = None  # None until the job has begun
    num_tiles_left: int = 0


@dataclass(slots=True)
class _TileUpdate:
    """A tile on its way through the pipeline."""

    job: Job
    tile: Tile
    step: UpdateStep
    takes_slot: bool
    lifecycle: Lifecycle[UpdateState]
    start_ns: int = 0
    fetch: Handle[TileLease] | None = None
    lease: TileLease | None = None
    gradient: Handle[None] | None = None  # where it is spilled
    gradient_slot: Lease | None = None


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A read or write in flight that nobody waits for at once; recorded as a span when it is seen to have ended."""

    name: str
    shard: int
    start_ns: int
    handle: Handle[None]
    update: _TileUpdate | None = None  # None: the shard's weights


class Pipeline:
    """Reads, computes and writes; `advance` makes one move. After it has raised, only `abandon` may be called.

    `resident_tiles` are those of each shard that need no slot. `gradient_slots` has as many slots as the pipeline, and is
    None where no gradient is spilled.
    """

    def __init__(
        self, *, store: UpdateStore, kernel: AdamKernel, recorder: Recorder, policy: IoPolicy, num_slots: int,
        resident_tiles: Mapping[int, frozenset[int]], gradient_slots: BufferPool | None,
    ) -> None:  # fmt: skip
        self._store = store
        self._kernel = kernel
        self._recorder = recorder
        self._reads_beside_writes = _READS_BESIDE_WRITES[policy]
        self._num_slots = num_slots
        self._num_slots_taken = 0
        self._resident_tiles = resident_tiles
        self._gradient_slots = gradient_slots
        self._latest: dict[int, Load] = {}  # by shard
        self._unfinished: list[Job] = []  # those whose load somebody may wait for in vain
        self._to_begin: list[Job] = []
        self._to_read: deque[_TileUpdate] = deque()
        self._reading: deque[_TileUpdate] = deque()
        self._computed: deque[_TileUpdate | Job] = deque()  # tiles, and jobs whose weights have to be written
        self._transfers: list[_Transfer] = []  # weights being read, tiles and weights being written

    def admit(self, job: Job) -> None:
        """Take a job; nothing is begun yet."""
        shard = job.layout.index
        job.before = self._latest.get(shard)
        job.num_tiles_left = len(job.tiles)
        self._latest[shard] = job.load
        self._unfinished.append(job)
        self._to_begin.append(job)
        if job.step is not None:
            spilled = self._store.gradients(shard) is None
            for tile in job.tiles:
                takes_slot = spilled or tile.index not in self._resident_tiles[shard]
                self._to_read.append(_TileUpdate(job, tile, job.step, takes_slot, update_lifecycle(tile)))

    @property
    def has_work(self) -> bool:
        """Whether there is more to do than to see transfers end."""
        return bool(self._to_begin or self._to_read or self._reading or self._computed)

    @property
    def is_quiet(self) -> bool:
        """Whether all that was admitted has been done and seen to end."""
        return not self.has_work and not self._transfers

    def advance(self) -> None:
        """Begin what may begin, and compute one tile. Blocks for its read, or for a transfer where nothing else can move."""
        self._land_ended()
        self._begin_jobs()
        self._begin_reads()
        self._keep_reading()
        if self._reading:
            self._compute(self._reading[0])
        if self._computed and (self._reads_beside_writes or not self._reading):
            self._begin_writes()
        elif not self._reading and self.has_work and self._transfers:
            self._land(self._transfers[0])

    def abandon(self, error: BaseException) -> None:
        """Wait until no buffer is in use, give the slots back, and fail every load that could still be waited for."""
        for update in (*self._reading, *self._computed):
            if isinstance(update, _TileUpdate):
                _give_back(update)
        _settle([transfer.handle for transfer in self._transfers])
        for job in self._unfinished:
            job.load.fail(error)

    # What may begin

    def _may_read(self) -> bool:
        return self._reads_beside_writes or all(transfer.name == _WEIGHTS_READ for transfer in self._transfers)

    def _begin_jobs(self) -> None:
        for job in list(self._to_begin):
            if job.before is None or job.before.written.done() or not (job.fetch or job.tiles):
                if job.fetch and not self._may_read():
                    return
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """Begin to read the weights; a job without an update is then out of the pipeline's hands."""
        self._to_begin.remove(job)
        shard, before, job.before = job.layout.index, job.before, None
        job.fetched = Ready(None)
        if job.fetch:
            start_ns = self._recorder.now_ns()
            job.fetched = self._store.fetch_weights(shard, job.weights)
            self._transfers.append(_Transfer(_WEIGHTS_READ, shard, start_ns, job.fetched))
        if job.tiles:
            return
        is_updating = before is not None and not job.fetch and not before.written.done()  # in the same buffer
        job.load.ready.follow(before.ready if before is not None and is_updating else job.fetched)
        job.load.written.follow(before.written if before is not None and is_updating else job.fetched)
        self._unfinished.remove(job)

    def _begin_reads(self) -> None:
        while self._to_read and self._may_read():
            update = self._to_read[0]
            if update.takes_slot and self._num_slots_taken == self._num_slots:
                return
            self._num_slots_taken += update.takes_slot
            self._reading.append(self._to_read.popleft())
            self._read(update)

    def _keep_reading(self) -> None:
        """Before the last tile that was read ahead is computed, wait for a write's slot, so that reads never run dry.

        The disk is busy with that write either way; and where it is duplex, its other half would have nothing to do.
        """
        writes = [transfer for transfer in self._transfers if transfer.update is not None]
        if self._reads_beside_writes and len(self._reading) == 1 and self._to_read and writes:
            self._land(writes[0])
            self._begin_reads()

    def _read(self, update: _TileUpdate) -> None:
        update.lifecycle.to(UpdateState.READING)
        update.start_ns = self._recorder.now_ns()
        update.fetch = self._store.fetch_tile(update.tile)
        if self._gradient_slots is not None and self._store.gradients(update.tile.shard) is None:
            update.gradient_slot = self._gradient_slots.lease()
            update.gradient = self._store.fetch_gradients(update.tile, update.gradient_slot.buffer)

    # Compute

    def _compute(self, update: _TileUpdate) -> None:
        job, tile = update.job, update.tile
        lease = self._arrived(update)
        self._wait_for_weights(job)
        self._computed.append(self._reading.popleft())
        update.lifecycle.to(UpdateState.COMPUTING)
        with self._recorder.span("update.compute", shard=tile.shard, tile=tile.index):
            compute_tile(
                self._kernel, job.layout, tile, update.step,
                state=lease.buffer.address, weights=job.weights.address, grad=self._grad_address(update),
            )  # fmt: skip
        if update.gradient_slot is not None:
            update.gradient_slot.release()
            update.gradient_slot = None
        job.num_tiles_left -= 1
        if job.num_tiles_left == 0:
            self._weights_are_new(job)

    def _arrived(self, update: _TileUpdate) -> TileLease:
        """Wait for the state and the gradient of a tile."""
        if update.fetch is None:
            raise IllegalTransition(f"{update.lifecycle.name}: computed before it was read.")
        update.lease = update.fetch.wait()
        if update.gradient is not None:
            update.gradient.wait()
        self._record("update.read", update.start_ns, update.tile.shard, update)
        return update.lease

    def _wait_for_weights(self, job: Job) -> None:
        if job.fetched is None:  # the load before it of the same shard is still being written, or is waiting to be
            self._begin_writes()
            if job.before is not None:
                job.before.written.wait()
            self._begin(job)
        if job.fetched is not None:
            job.fetched.wait()

    def _grad_address(self, update: _TileUpdate) -> int:
        element_bytes = ELEMENT_BYTES[update.step.grad_dtype]
        if update.gradient_slot is not None:
            return update.gradient_slot.buffer.address + gradient_window(update.tile, element_bytes).lead_bytes
        resident = self._store.gradients(update.tile.shard)
        if resident is None:
            raise IllegalTransition(f"{update.lifecycle.name}: its gradient is neither resident nor was it fetched.")
        return resident.address + update.tile.state_offset * element_bytes

    def _weights_are_new(self, job: Job) -> None:
        job.load.ready.follow(Ready(None))
        if self._store.weights(job.layout.index) is None:
            self._computed.append(job)
        else:
            job.load.written.follow(Ready(None))
            self._unfinished.remove(job)

    # Writes

    def _begin_writes(self) -> None:
        if not self._reads_beside_writes:
            for transfer in [one for one in self._transfers if one.name == _WEIGHTS_READ]:
                self._land(transfer)
        while self._computed:
            item = self._computed[0]
            start_ns = self._recorder.now_ns()
            if isinstance(item, Job):
                handle = self._store.publish_weights(item.layout.index, item.weights)
                self._transfers.append(_Transfer("weights.write", item.layout.index, start_ns, handle))
                item.load.written.follow(handle)
                self._unfinished.remove(item)
            elif item.lease is not None:
                handle = self._store.publish_tile(item.tile, item.lease)
                item.lifecycle.to(UpdateState.WRITING)
                self._transfers.append(_Transfer("update.write", item.tile.shard, start_ns, handle, item))
            self._computed.popleft()

    def _land_ended(self) -> None:
        for transfer in [one for one in self._transfers if one.handle.done()]:
            self._land(transfer)

    def _land(self, transfer: _Transfer) -> None:
        """Wait for a transfer and book its end."""
        transfer.handle.wait()
        self._transfers.remove(transfer)
        update = transfer.update
        self._record(transfer.name, transfer.start_ns, transfer.shard, update)
        if update is not None:
            update.lifecycle.to(UpdateState.DONE)
            self._num_slots_taken -= update.takes_slot

    def _record(self, name: str, start_ns: int, shard: int, update: _TileUpdate | None) -> None:
        where = {} if update is None else {"tile": update.tile.index}
        self._recorder.add_span(name, start_ns, self._recorder.now_ns(), shard=shard, **where)


_WEIGHTS_READ = "weights.read"


def _give_back(update: _TileUpdate) -> None:
    """Wait for what still comes into the slots of an update that will not be finished, and release them."""
    _settle([handle for handle in (update.fetch, update.gradient) if handle is not None])
    if update.gradient_slot is not None:
        update.gradient_slot.release()
    if update.fetch is not None:
        with contextlib.suppress(InfinityError):  # a failed read has given its slot back
            update.fetch.wait().release()


def _settle(handles: Sequence[Handle[object]]) -> None:
    """Wait for all of them; the error that matters is known already."""
    with contextlib.suppress(InfinityError):
        AllOf(handles).wait()
