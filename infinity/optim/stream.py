"""The update stream: each unit's tiles flow read -> Adam -> write on one thread, beside the next forward.

`begin` fixes a step; from then on each shard that it touches has a *pending* update, which is made when the shard is loaded.
So a unit's forward waits for that unit's update only, and takes the new weights from the buffer that the update wrote.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from infinity.errors import IllegalTransition
from infinity.memory.arena import Buffer
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, Lease, open_pool
from infinity.optim.hyper import UpdateStep
from infinity.optim.kernel import AdamKernel
from infinity.optim.load import Load
from infinity.optim.pipeline import IoPolicy, Job, Pipeline, UpdateStore
from infinity.optim.tile_update import touched_tiles
from infinity.states import Lifecycle, Tier
from infinity.store.extents import gradient_window
from infinity.store.layout import ShardLayout, Tile
from infinity.store.shares import ShardShares
from infinity.telemetry.recorder import Recorder

# Nothing tells the thread that a transfer has ended while it waits for loads, so it looks this often.
_POLL_SECONDS = 0.002
# Where no tile needs a slot of the store, spilled gradients still need two: one computing, one reading.
_NUM_SLOTS_WITHOUT_TILES = 2


class StreamState(Enum):
    """OPEN: takes loads. FAILED: the first error ended it; the state of training is partly updated. CLOSED: ended."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


STREAM_MOVES = {
    StreamState.OPEN: (StreamState.FAILED, StreamState.CLOSED),
    StreamState.FAILED: (StreamState.CLOSED,),
    StreamState.CLOSED: (),
}


class UpdateStream:
    """Loads weights and updates them on the way. Its opener closes it; one thread at a time calls it.

    The first error fails every load that has not ended, and `drain`; from then on the stream refuses loads. Buffers given
    to `load` must stay alive until the load's `written` is done.
    """

    def __init__(
        self, *, store: UpdateStore, layouts: Sequence[ShardLayout], pipeline: Pipeline, gradient_slots: BufferPool | None,
        lease_weights: Callable[[int], Lease],
    ) -> None:  # fmt: skip
        self._store = store
        self._layouts = {layout.index: layout for layout in layouts}
        self._pipeline = pipeline
        self._gradient_slots = gradient_slots
        self._lease_weights = lease_weights
        self._changed = threading.Condition()
        self._lifecycle = Lifecycle("Update stream", StreamState.OPEN, STREAM_MOVES)
        self._error: BaseException | None = None
        self._error_was_raised = False
        self._pending: dict[int, tuple[UpdateStep, tuple[Tile, ...]]] = {}  # by shard: the tiles that it touches
        self._queue: deque[Job] = deque()
        self._is_quiet = True
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="update-stream", daemon=True)

    def start(self) -> None:
        """Start the thread (called once, by `open_update_stream`)."""
        self._thread.start()

    @property
    def gradient_buffer(self) -> Buffer | None:
        """The memory that spilled gradients come into; None where none is spilled."""
        return self._gradient_slots.buffer if self._gradient_slots is not None else None

    @property
    def pending_shards(self) -> tuple[int, ...]:
        """The shards whose update has been fixed by `begin` and not been asked for yet."""
        with self._changed:
            return tuple(self._pending)

    def begin(self, step: UpdateStep) -> None:
        """Make `step` pending for every shard that it touches. Updates that the step before left are made first.

        The gradients must be in their place (resident, or published and written) and stay there until the update.
        """
        if self.pending_shards:
            self.drain()
        with self._changed:
            self._require_open()
            touched = {index: touched_tiles(layout, step) for index, layout in self._layouts.items()}
            self._pending = {index: (step, tiles) for index, tiles in touched.items() if tiles}

    def load(self, shard: int, weights: Buffer, *, fetch: bool) -> Load:
        """Queue: read the weights into the buffer if `fetch`, make the update if one is pending, write the weights back.

        Without `fetch` the buffer holds the shard's last weights already. Loads are served in order. Weights are written
        back only after an update, and only where they live on NVMe.
        Raises IllegalTransition when the stream has failed or is closed.
        """
        with self._changed:
            self._require_open()
            step, tiles = self._pending.pop(shard, (None, ()))
            job = Job(self._layouts[shard], weights, fetch, step, tiles)
            self._queue.append(job)
            self._is_quiet = False
            self._changed.notify_all()
        return job.load

    def drain(self) -> None:
        """Make every pending update, also of shards that nobody asked for, and wait until all is written.

        Raises the stream's first error.
        """
        for shard in self.pending_shards:
            self._load_unasked(shard)
        with self._changed:
            self._changed.wait_for(lambda: self._is_quiet or self._error is not None)
            if self._error is not None:
                self._error_was_raised = True
                raise self._error

    def close(self) -> None:
        """End the thread when the loads that were queued are done and written; pending updates are not made.

        Raises the stream's first error unless `drain`, `begin` or `load` has raised it. Closing twice is fine.
        """
        if self._lifecycle.state is StreamState.CLOSED:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._lifecycle.to(StreamState.CLOSED)
        if self._gradient_slots is not None:
            self._gradient_slots.close()
        if self._error is not None and not self._error_was_raised:
            raise self._error

    def _load_unasked(self, shard: int) -> None:
        resident = self._store.weights(shard)
        if resident is not None:
            self.load(shard, resident, fetch=False)
            return
        lease = self._lease_weights(shard)
        load = self.load(shard, lease.buffer, fetch=True)
        lease.release_after(load.written)

    def _require_open(self) -> None:
        if self._lifecycle.state is not StreamState.OPEN or self._stopping:
            cause = f" after {self._error}" if self._error is not None else ""
            self._error_was_raised = True
            raise IllegalTransition(
                f"Update stream is {self._lifecycle.state.name}{cause}; it takes no more loads."
            ) from self._error

    # The thread

    def _work(self) -> None:
        try:
            while self._wait_for_move():
                self._pipeline.advance()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every load and `drain` raises it
            self._fail(error)

    def _wait_for_move(self) -> bool:
        """Admit what was queued and return when the pipeline can move; False when the stream ends."""
        with self._changed:
            while True:
                while self._queue:
                    self._pipeline.admit(self._queue.popleft())
                if self._pipeline.has_work:
                    return True
                if self._pipeline.is_quiet:
                    self._is_quiet = True
                    self._changed.notify_all()
                    if self._stopping:
                        return False
                    self._changed.wait()
                elif not self._changed.wait(timeout=_POLL_SECONDS):
                    return True

    def _fail(self, error: Exception) -> None:
        self._pipeline.abandon(error)
        with self._changed:
            self._error = error
            self._lifecycle.to(StreamState.FAILED)
            for job in self._queue:
                job.load.fail(error)
            self._queue.clear()
            self._changed.notify_all()


def open_update_stream(
    *,
    store: UpdateStore,
    shards: Sequence[tuple[ShardLayout, ShardShares]],
    kernel: AdamKernel,
    recorder: Recorder,
    ledger: Ledger,
    grad_element_bytes: int,
    lease_weights: Callable[[int], Lease],
    policy: IoPolicy = IoPolicy.MIXED,
) -> UpdateStream:
    """Return a running stream over the shards of `store`.

    `lease_weights` gives `drain` a buffer for the weights of a shard that is not resident; it is released when written.
    Spilled gradients get slots of their own, asked from the ledger. Raises OverBudget.
    """
    num_slots = store.num_tile_slots or _NUM_SLOTS_WITHOUT_TILES
    gradient_slots = _open_gradient_slots(shards, num_slots, grad_element_bytes, ledger)
    pipeline = Pipeline(
        store=store, kernel=kernel, recorder=recorder, policy=policy, num_slots=num_slots,
        resident_tiles={layout.index: shares.resident_tiles for layout, shares in shards}, gradient_slots=gradient_slots,
    )  # fmt: skip
    stream = UpdateStream(
        store=store, layouts=[layout for layout, _ in shards], pipeline=pipeline, gradient_slots=gradient_slots,
        lease_weights=lease_weights,
    )  # fmt: skip
    stream.start()
    return stream


def _open_gradient_slots(
    shards: Sequence[tuple[ShardLayout, ShardShares]], num_slots: int, grad_element_bytes: int, ledger: Ledger
) -> BufferPool | None:
    spilled = [tile for layout, shares in shards if shares.grads is Tier.NVME for tile in layout.tiles]
    if not spilled:
        return None
    return open_pool(
        slot_bytes=max(gradient_window(tile, grad_element_bytes).num_bytes for tile in spilled), num_slots=num_slots,
        ledger=ledger, tier=Tier.CPU, owner="gradient slots", pin=False,
    )  # fmt: skip
