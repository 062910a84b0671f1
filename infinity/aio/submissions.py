"""What was submitted to the C engine: a batch of requests in one array, a light handle on each, and who is still to be told.

A batch is filled, looked at and forgotten as a whole, so that a request costs next to nothing: its handle is two references,
and once the whole batch went well a wait is the look at one flag.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence

from infinity.aio.files import DirectFile
from infinity.aio.native import NativeEngine, ffi, lib
from infinity.aio.outstanding import raise_unwaited
from infinity.aio.request import Op, Request, RequestState, request_error
from infinity.errors import StorageError

# aio_operation, the first bytes of an aio_request: fd, ticket, writes, granule_bytes; offset, address, length.
_OPERATION = struct.Struct("=4iqQq")
_NO_TICKET = -1
_OVER = int(RequestState.DONE)
# Signals reach Python's handlers between two waits.
_WAIT_MILLISECONDS = 500
_SWEEP_AT = 64
_BATCH_TYPE = ffi and ffi.typeof("aio_request[]")
_STRIDE_BYTES: int = ffi and ffi.sizeof("aio_request")


class Batch:
    """The requests of one submission. It keeps their buffers alive; any thread may wait."""

    __slots__ = ("_engine", "_failures", "_noticed", "_submissions", "native", "requests", "settled", "went_well")

    def __init__(self, requests: Sequence[Request], engine: NativeEngine, submissions: Submissions) -> None:
        self.requests = tuple(requests)
        self.native = ffi.new(_BATCH_TYPE, len(self.requests))
        self.settled = False  # every request is over, and what became of it is known
        self.went_well = False  # settled without a failure
        self._engine = engine
        self._submissions = submissions
        self._failures: dict[int, StorageError] = {}
        self._noticed: set[int] = set()  # the failures that were raised

    def fill(self, tickets: Mapping[DirectFile, int]) -> None:
        """Write the requests where the C engine reads them. Raises struct.error for numbers beyond 64 bits."""
        view, position, pack, write = ffi.buffer(self.native), 0, _OPERATION.pack_into, Op.WRITE
        for request in self.requests:
            file = request.file
            fd = file.fd
            ticket = tickets.get(file, _NO_TICKET) if fd >= 0 else _NO_TICKET  # a closed file is never served
            pack(
                view, position, fd, ticket, request.op is write, file.granule_bytes,
                request.offset, request.address, request.length,
            )  # fmt: skip
            position += _STRIDE_BYTES

    def submit(self) -> int:
        """Hand the requests to the C engine; return 0 or -errno."""
        return int(lib.aio_submit(self._engine.pointer, self.native, len(self.requests)))

    def wait(self, index: int) -> None:
        """Wait for one request. Raises the StorageError that it failed with."""
        while not self.settled:
            outcome = lib.aio_wait(self._engine.pointer, self.native, len(self.requests), index, _WAIT_MILLISECONDS)
            if outcome == lib.AIO_ALL_OVER:
                self._settle()
            elif outcome == lib.AIO_OVER:
                break
        failure = self._failure(index)
        if failure is not None:
            self._noticed.add(index)
            self._submissions.forget_if_quiet(self)
            raise failure

    def look(self) -> None:
        """Take notice if all requests are over; never waits."""
        count = len(self.requests)
        if not self.settled and lib.aio_wait(self._engine.pointer, self.native, count, count - 1, 0) == lib.AIO_ALL_OVER:
            self._settle()

    def unnoticed(self) -> list[tuple[Op, StorageError]]:
        """Return the failures that nobody has waited for; only once settled."""
        return [(self.requests[index].op, error) for index, error in self._failures.items() if index not in self._noticed]

    def _failure(self, index: int) -> StorageError | None:
        """Return why a request failed; only once it is over. Every call returns the same error."""
        if self.went_well:
            return None
        native = self.native[index]
        if not native.code:
            return None
        return self._failures.setdefault(index, request_error(self.requests[index], native.code, native.failed_offset))

    def _settle(self) -> None:
        """Two threads at once do the same twice, which is harmless."""
        count = len(self.requests)
        failed = lib.aio_next_failure(self.native, count, 0)
        self.went_well = failed == count
        while failed < count:
            self._failure(failed)
            failed = lib.aio_next_failure(self.native, count, failed + 1)
        for index, request in enumerate(self.requests):
            if not request.file.direct and index not in self._failures:
                request.file.drop_cache(request.offset, request.length)
        self.settled = True
        self._submissions.forget_if_quiet(self)


class UringHandle:
    """The handle of one request of a batch."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def state(self) -> RequestState:
        return RequestState(self._batch.native[self._index].state)

    @property
    def latency_nanoseconds(self) -> int | None:
        """See RequestHandle.latency_nanoseconds."""
        return int(self._batch.native[self._index].latency_nanoseconds) or None if self.done() else None

    def done(self) -> bool:
        return self._batch.settled or bool(self._batch.native[self._index].state >= _OVER)

    def wait(self) -> None:
        if not self._batch.went_well:
            self._batch.wait(self._index)


class Submissions:
    """The batches that are not known to be over, or whose failures nobody has waited for. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: set[Batch] = set()
        self._sweep_at = _SWEEP_AT

    def add(self, batch: Batch) -> None:
        """Keep a batch alive. Those that went well leave by themselves when there are twice as many as there were."""
        with self._lock:
            self._batches.add(batch)
            due = tuple(self._batches) if len(self._batches) >= self._sweep_at else ()
        if due:
            for one in due:
                one.look()
            with self._lock:
                self._sweep_at = max(_SWEEP_AT, 2 * len(self._batches))

    def discard(self, batch: Batch) -> None:
        """Forget a batch: it was refused."""
        with self._lock:
            self._batches.discard(batch)

    def forget_if_quiet(self, batch: Batch) -> None:
        """Forget a batch if it is settled and every failure of it was raised."""
        if batch.settled and not batch.unnoticed():
            self.discard(batch)

    def raise_failures(self) -> None:
        """Raise StorageError for the failed requests that nobody has waited for; all requests are over."""
        with self._lock:
            batches, self._batches = self._batches, set()
        for batch in batches:
            batch.look()
        raise_unwaited([failure for batch in batches for failure in batch.unnoticed()])
