"""The thread engine: preadv and pwritev in a pool of threads, for machines where io_uring cannot be had."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.aio.engine import ENGINE_MOVES, UNREGISTERED, EngineState, MemoryRange
from infinity.aio.failures import END_OF_FILE
from infinity.aio.files import DirectFile
from infinity.aio.outstanding import Outstanding
from infinity.aio.request import REQUEST_MOVES, Op, Request, RequestState, request_error
from infinity.errors import IllegalTransition, PlatformError, StorageError
from infinity.handles import Handle, Promise
from infinity.states import Lifecycle

# As in csrc/aio/ring.c, whose twin this engine is.
_READ_RUN = 8
_MAX_RETRIES = 64  # of one piece without progress
_MAX_OFFSET = 2**63 - 1


class ThreadHandle:
    """The handle of one request; its counters belong to the engine, below the engine's lock."""

    __slots__ = ("_outstanding", "code", "failed_offset", "in_flight", "issued_bytes", "lifecycle", "promise", "request")

    def __init__(self, request: Request, outstanding: Outstanding) -> None:
        self.request = request
        self.lifecycle = Lifecycle("request", RequestState.QUEUED, REQUEST_MOVES)
        self.promise: Promise[StorageError | None] = Promise()
        self.issued_bytes = 0
        self.in_flight = 0
        self.code = 0  # 0, -errno or END_OF_FILE
        self.failed_offset = request.offset
        self._outstanding = outstanding

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    def done(self) -> bool:
        return self.promise.done()

    def wait(self) -> None:
        failure = self.promise.wait()
        self._outstanding.notice(self)
        if failure is not None:
            raise failure

    def failure(self) -> StorageError | None:
        """Return why the request failed; only once `done`."""
        return self.promise.wait()

    def fail(self, code: int, offset: int) -> None:
        """Keep the first failure; what was not issued yet never will be."""
        if not self.code:
            self.code, self.failed_offset = code, offset
        self.issued_bytes = self.request.length


@dataclass(slots=True)
class _Piece:
    handle: ThreadHandle
    offset: int
    address: int
    length: int  # what is left of it
    retries: int = 0  # since it last made progress


class ThreadEngine:
    """One thread for each piece in flight, up to `queue_depth`, started when there is work for it."""

    name = "threads"
    facts = UNREGISTERED

    def __init__(self, queue_depth: int, block_bytes: int, faults: Mapping[int, int]) -> None:
        self._queue_depth = queue_depth
        self._block_bytes = block_bytes
        self._faults = faults
        self._outstanding = Outstanding()
        self._lifecycle = Lifecycle("thread engine", EngineState.OPEN, ENGINE_MOVES)
        self._closing = threading.Lock()
        self._work = threading.Condition()
        # Below the lock of _work.
        self._reads: deque[ThreadHandle] = deque()  # only the head is partly issued
        self._writes: deque[ThreadHandle] = deque()
        self._threads: list[threading.Thread] = []
        self._read_run = 0
        self._num_completions = 0

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        """See Engine.submit."""
        handles = [ThreadHandle(request, self._outstanding) for request in requests]
        with self._work:
            if self._lifecycle.state is EngineState.CLOSED:
                raise IllegalTransition("thread engine: it is CLOSED and takes no requests.")
            num_pieces = sum(-(-max(request.length, 0) // self._block_bytes) for request in requests)
            self._start_threads(min(num_pieces, self._queue_depth - len(self._threads)))
            for handle in handles:
                self._enqueue(handle)
            self._work.notify(num_pieces)
        self._outstanding.add(handles)
        return list[Handle[None]](handles)

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register: threads have nothing to register."""

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister."""

    def close(self) -> None:
        """See Engine.close."""
        with self._closing:
            with self._work:
                if self._lifecycle.state is EngineState.CLOSED:
                    return
                self._lifecycle.to(EngineState.CLOSED)
                self._cancel_unissued(self._reads)
                self._cancel_unissued(self._writes)
                self._work.notify_all()
            for thread in self._threads:
                thread.join()
        self._outstanding.raise_failures()

    def _enqueue(self, handle: ThreadHandle) -> None:
        request = handle.request
        if not _is_legal(request):
            handle.fail(-errno.EINVAL, request.offset)
        if handle.code or request.length == 0:
            self._finish(handle)
        else:
            (self._reads if request.op is Op.READ else self._writes).append(handle)

    def _start_threads(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise PlatformError("The thread engine cannot start a thread.", remedy="Raise `ulimit -u`.") from error
                return
            self._threads.append(thread)

    def _cancel_unissued(self, queue: deque[ThreadHandle]) -> None:
        partly = [handle for handle in queue if handle.issued_bytes]
        for handle in queue:
            if not handle.issued_bytes:
                handle.fail(-errno.ECANCELED, handle.request.offset)
                self._finish(handle)
        queue.clear()
        queue.extend(partly)

    def _serve(self) -> None:
        while (piece := self._take()) is not None:
            code = self._transfer(piece)
            if self._retire(piece, code):
                self._finish(piece.handle)

    def _take(self) -> _Piece | None:
        """Return the next piece, or None when the engine is closed and nothing is left."""
        with self._work:
            while not (self._reads or self._writes):
                if self._lifecycle.state is EngineState.CLOSED:
                    return None
                self._work.wait()
            queue = self._next_queue()
            handle = queue[0]
            request, issued = handle.request, handle.issued_bytes
            length = min(self._block_bytes, request.length - issued)
            handle.issued_bytes += length
            handle.in_flight += 1
            if handle.issued_bytes == request.length:
                queue.popleft()
            if handle.lifecycle.state is RequestState.QUEUED:
                handle.lifecycle.to(RequestState.SUBMITTED)
            return _Piece(handle, request.offset + issued, request.address + issued, length)

    def _next_queue(self) -> deque[ThreadHandle]:
        if self._reads and (not self._writes or self._read_run < _READ_RUN):
            self._read_run += 1
            return self._reads
        self._read_run = 0
        return self._writes

    def _transfer(self, piece: _Piece) -> int:
        """Move the piece and return 0, -errno or END_OF_FILE. A result is an error, short, or done; nothing else."""
        reads, granule = piece.handle.request.op is Op.READ, piece.handle.request.file.granule_bytes
        while True:
            result = self._attempt(piece)
            if result == piece.length:
                return 0
            if result < 0:
                if result not in (-errno.EAGAIN, -errno.EINTR) or piece.retries >= _MAX_RETRIES:
                    return result
                piece.retries += 1
                continue
            # Under O_DIRECT the rest must start at a block; less than one block read is the end of the file.
            moved = result - result % granule
            if moved:
                self._advance(piece, moved)
            elif reads:
                piece.offset += result
                return END_OF_FILE
            elif piece.retries >= _MAX_RETRIES:
                return -errno.EIO
            else:
                piece.retries += 1

    def _attempt(self, piece: _Piece) -> int:
        """Make one system call; return the number of bytes moved, or -errno."""
        request = piece.handle.request
        memory = (ctypes.c_char * piece.length).from_address(piece.address)
        move = os.preadv if request.op is Op.READ else os.pwritev
        try:
            result = move(request.file.fd, [memory], piece.offset)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        with self._work:
            number, self._num_completions = self._num_completions, self._num_completions + 1
        return self._faults.get(number, result)

    def _advance(self, piece: _Piece, moved: int) -> None:
        piece.offset += moved
        piece.address += moved
        piece.length -= moved
        piece.retries = 0
        with self._work:
            piece.handle.lifecycle.to(RequestState.PARTIAL)

    def _retire(self, piece: _Piece, code: int) -> bool:
        """Take the piece's end into its request; return whether the request is over."""
        handle = piece.handle
        with self._work:
            if code:
                if handle.issued_bytes < handle.request.length:
                    (self._reads if handle.request.op is Op.READ else self._writes).popleft()
                handle.fail(code, piece.offset)
            handle.in_flight -= 1
            return handle.in_flight == 0 and handle.issued_bytes == handle.request.length

    def _finish(self, handle: ThreadHandle) -> None:
        request = handle.request
        failure = request_error(request, handle.code, handle.failed_offset) if handle.code else None
        if failure is None:
            request.file.drop_cache(request.offset, request.length)
        handle.lifecycle.to(RequestState.FAILED if failure else RequestState.DONE)
        handle.promise.resolve(failure)


def _is_legal(request: Request) -> bool:
    """Return whether the numbers of a request make sense; see `check` in csrc/aio/engine.c."""
    granule = request.file.granule_bytes
    in_range = request.offset >= 0 and 0 <= request.length <= _MAX_OFFSET - request.offset
    return in_range and not (request.offset % granule or request.address % granule or request.length % granule)


def open_threads(*, queue_depth: int, block_bytes: int, faults: Mapping[int, int] | None = None) -> ThreadEngine:
    """Open the engine; the arguments are those of `open_uring`. Raises PlatformError for sizes that it does not take."""
    if not (1 <= queue_depth <= 4096 and 1 <= block_bytes <= 1 << 30):
        raise PlatformError(
            f"queue_depth {queue_depth} and block_bytes {block_bytes} are not both in range.",
            remedy="The queue depth is 1 to 4096 and the block at most 1 GiB.",
        )
    return ThreadEngine(queue_depth, block_bytes, faults or {})
