"""The thread engine: preadv and pwritev in a pool of threads, for machines where io_uring cannot be had."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Mapping, Sequence

from infinity.aio.engine import ENGINE_MOVES, UNREGISTERED, EngineState, MemoryRange, RequestHandle
from infinity.aio.files import DirectFile
from infinity.aio.outstanding import Outstanding
from infinity.aio.pieces import Piece, PieceHandle, PieceQueue, Step, require_sizes
from infinity.aio.request import Op, Request
from infinity.errors import IllegalTransition, PlatformError
from infinity.states import Lifecycle


class ThreadEngine:
    """One thread for each piece in flight, up to `queue_depth`, started when there is work for it."""

    name = "threads"
    facts = UNREGISTERED

    def __init__(self, queue_depth: int, pieces: PieceQueue) -> None:
        self._queue_depth = queue_depth
        self._outstanding = Outstanding()
        self._lifecycle = Lifecycle("thread engine", EngineState.OPEN, ENGINE_MOVES)
        self._closing = threading.Lock()
        self._work = threading.Condition()
        # Below the lock of _work.
        self._pieces = pieces
        self._threads: list[threading.Thread] = []

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """See Engine.submit."""
        handles = [PieceHandle(request, self._outstanding) for request in requests]
        with self._work:
            if self._lifecycle.state is EngineState.CLOSED:
                raise IllegalTransition("thread engine: it is CLOSED and takes no requests.")
            num_pieces = sum(self._pieces.num_pieces(request) for request in requests)
            self._start_threads(min(num_pieces, self._queue_depth - len(self._threads)))
            over = [handle for handle in handles if self._pieces.add(handle)]
            self._work.notify(num_pieces)
        for handle in over:
            handle.finish()
        self._outstanding.add(handles)
        return list[RequestHandle](handles)

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
                cancelled = self._pieces.cancel_unissued()
                self._work.notify_all()
            for handle in cancelled:
                handle.finish()
            for thread in self._threads:
                thread.join()
        self._outstanding.raise_failures()

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

    def _serve(self) -> None:
        while (piece := self._take()) is not None:
            step = Step.AGAIN
            while step is Step.AGAIN:
                result = _attempt(piece)
                with self._work:
                    step = self._pieces.complete(piece, result)
            if step is Step.REQUEST_OVER:
                _finish(piece.handle)

    def _take(self) -> Piece | None:
        """Return the next piece, or None when the engine is closed and nothing is left."""
        with self._work:
            while (piece := self._pieces.take()) is None and self._lifecycle.state is EngineState.OPEN:
                self._work.wait()
            return piece


def _attempt(piece: Piece) -> int:
    """Make one system call; return the number of bytes moved, or -errno."""
    request = piece.handle.request
    memory = (ctypes.c_char * piece.length).from_address(piece.address)
    move = os.preadv if request.op is Op.READ else os.pwritev
    try:
        return move(request.file.fd, [memory], piece.offset)
    except OSError as error:
        return -(error.errno or errno.EIO)


def _finish(handle: PieceHandle) -> None:
    request = handle.request
    if not (handle.code or request.file.direct):
        request.file.drop_cache(request.offset, request.length)
    handle.finish()


def open_threads(*, queue_depth: int, block_bytes: int, faults: Mapping[int, int] | None = None) -> ThreadEngine:
    """Open the engine; the arguments are those of `open_uring`.

    Raises PlatformError for sizes that it does not take, and where the system has no preadv.
    """
    require_sizes(queue_depth, block_bytes)
    if not hasattr(os, "preadv"):
        raise PlatformError(
            "The thread engine cannot be used: this system has no preadv.", remedy='Use the engine "buffered".'
        )
    return ThreadEngine(queue_depth, PieceQueue(block_bytes, faults or {}))
