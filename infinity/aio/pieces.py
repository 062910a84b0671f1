"""Requests as the engines in Python work on them: cut into pieces, reads first, every completion in one of three cases."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from infinity.aio.failures import END_OF_FILE
from infinity.aio.outstanding import Outstanding
from infinity.aio.request import REQUEST_MOVES, Op, Request, RequestState, request_error
from infinity.errors import PlatformError, StorageError
from infinity.handles import Promise
from infinity.states import Lifecycle

# As in csrc/aio/ring.c, whose twin this is.
_READ_RUN = 8
_MAX_RETRIES = 64  # of one piece without progress
_MAX_OFFSET = 2**63 - 1


class PieceHandle:
    """The handle of one request; its counters belong to the queue that it is in."""

    __slots__ = (
        "_outstanding",
        "code",
        "failed_offset",
        "in_flight",
        "issued_bytes",
        "issued_nanoseconds",
        "lifecycle",
        "over_nanoseconds",
        "promise",
        "request",
    )

    def __init__(self, request: Request, outstanding: Outstanding) -> None:
        self.request = request
        self.lifecycle = Lifecycle("request", RequestState.QUEUED, REQUEST_MOVES)
        self.promise: Promise[StorageError | None] = Promise()
        self.issued_bytes = 0
        self.issued_nanoseconds = 0  # when its first piece was, and its last one over, by the monotonic clock; 0: not yet
        self.over_nanoseconds = 0
        self.in_flight = 0
        self.code = 0  # 0, -errno or END_OF_FILE
        self.failed_offset = request.offset
        self._outstanding = outstanding

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    @property
    def latency_nanoseconds(self) -> int | None:
        """See RequestHandle.latency_nanoseconds."""
        return self.over_nanoseconds - self.issued_nanoseconds if self.over_nanoseconds and self.done() else None

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

    def finish(self) -> None:
        """Wake whoever waits: the request is over."""
        failure = request_error(self.request, self.code, self.failed_offset) if self.code else None
        self.lifecycle.to(RequestState.FAILED if failure else RequestState.DONE)
        self.promise.resolve(failure)


@dataclass(slots=True)
class Piece:
    """One block of a request on its way; offset, address and length are those of what is left of it."""

    handle: PieceHandle
    offset: int
    address: int
    length: int
    retries: int = 0  # since it last made progress


class Step(Enum):
    """What follows from a completion."""

    AGAIN = auto()  # what is left of the piece is to be moved
    PIECE_OVER = auto()  # the piece is over, its request is not
    REQUEST_OVER = auto()  # both are over: the engine finishes the handle


class PieceQueue:
    """The requests of one engine until their last piece is issued, and the rules for what becomes of a piece.

    It neither moves a byte nor locks: the engine that owns it calls it below its lock, or on one thread alone.
    """

    def __init__(self, block_bytes: int, faults: Mapping[int, int]) -> None:
        self._block_bytes = block_bytes
        self._faults = faults
        self._reads: deque[PieceHandle] = deque()  # only the head is partly issued
        self._writes: deque[PieceHandle] = deque()
        self._read_run = 0
        self._num_completions = 0

    def __bool__(self) -> bool:
        return bool(self._reads or self._writes)

    def add(self, handle: PieceHandle) -> bool:
        """Queue a request; return whether it is over already, because it is illegal or has nothing to move."""
        request = handle.request
        if not _is_legal(request):
            handle.fail(-errno.EINVAL, request.offset)
        if handle.code or request.length == 0:
            return True
        self._queue_of(request).append(handle)
        return False

    def num_pieces(self, request: Request) -> int:
        """Return how many pieces a request is cut into."""
        return -(-max(request.length, 0) // self._block_bytes)

    def take(self) -> Piece | None:
        """Return the next piece to move; None where nothing waits."""
        if not self:
            return None
        queue = self._next_queue()
        handle = queue[0]
        request, issued = handle.request, handle.issued_bytes
        length = min(self._block_bytes, request.length - issued)
        handle.issued_bytes += length
        handle.in_flight += 1
        if handle.issued_bytes == request.length:
            queue.popleft()
        if handle.lifecycle.state is RequestState.QUEUED:
            handle.issued_nanoseconds = time.monotonic_ns()
            handle.lifecycle.to(RequestState.SUBMITTED)
        return Piece(handle, request.offset + issued, request.address + issued, length)

    def complete(self, piece: Piece, result: int) -> Step:
        """Take in what an attempt to move the piece gave: the bytes moved, or -errno."""
        number, self._num_completions = self._num_completions, self._num_completions + 1
        code = self._outcome(piece, self._faults.get(number, result))
        if code is None:
            return Step.AGAIN
        handle = piece.handle
        if code:
            if handle.issued_bytes < handle.request.length:
                self._queue_of(handle.request).popleft()
            handle.fail(code, piece.offset)
        handle.in_flight -= 1
        if handle.in_flight or handle.issued_bytes < handle.request.length:
            return Step.PIECE_OVER
        handle.over_nanoseconds = time.monotonic_ns()
        return Step.REQUEST_OVER

    def cancel_unissued(self) -> list[PieceHandle]:
        """Fail the requests of which nothing was issued, and return them: they are over. The others stay."""
        cancelled: list[PieceHandle] = []
        for queue in (self._reads, self._writes):
            cancelled += [handle for handle in queue if not handle.issued_bytes]
            partly = [handle for handle in queue if handle.issued_bytes]
            queue.clear()
            queue.extend(partly)
        for handle in cancelled:
            handle.fail(-errno.ECANCELED, handle.request.offset)
        return cancelled

    def _queue_of(self, request: Request) -> deque[PieceHandle]:
        return self._reads if request.op is Op.READ else self._writes

    def _next_queue(self) -> deque[PieceHandle]:
        if self._reads and (not self._writes or self._read_run < _READ_RUN):
            self._read_run += 1
            return self._reads
        self._read_run = 0
        return self._writes

    def _outcome(self, piece: Piece, result: int) -> int | None:
        """Return the piece's end: 0, -errno or END_OF_FILE; None: again. A result is an error, short, or done."""
        if result == piece.length:
            return 0
        if result < 0:
            return self._retry(piece, result) if result in (-errno.EAGAIN, -errno.EINTR) else result
        # Under O_DIRECT the rest must start at a block; less than one block read is the end of the file.
        request = piece.handle.request
        moved = result - result % request.file.granule_bytes
        if moved:
            piece.offset += moved
            piece.address += moved
            piece.length -= moved
            piece.retries = 0
            piece.handle.lifecycle.to(RequestState.PARTIAL)
        elif request.op is Op.READ:
            piece.offset += result
            return END_OF_FILE
        return self._retry(piece, -errno.EIO)

    def _retry(self, piece: Piece, code: int) -> int | None:
        """Return None while another try makes sense, afterwards `code`."""
        if piece.handle.code or piece.retries >= _MAX_RETRIES:
            return code
        piece.retries += 1
        return None


def _is_legal(request: Request) -> bool:
    """Return whether the numbers of a request make sense; see `check` in csrc/aio/engine.c."""
    granule = request.file.granule_bytes
    in_range = request.offset >= 0 and 0 <= request.length <= _MAX_OFFSET - request.offset
    return in_range and not (request.offset % granule or request.address % granule or request.length % granule)


def require_sizes(queue_depth: int, block_bytes: int) -> None:
    """Raise PlatformError for sizes that no engine takes; those of csrc/aio/aio.h."""
    if not (1 <= queue_depth <= 4096 and 1 <= block_bytes <= 1 << 30):
        raise PlatformError(
            f"queue_depth {queue_depth} and block_bytes {block_bytes} are not both in range.",
            remedy="The queue depth is 1 to 4096 and the block at most 1 GiB.",
        )
