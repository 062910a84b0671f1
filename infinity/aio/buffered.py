"""The buffered engine: open files of aiofiles behind one event loop, for systems that allow nothing else."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from infinity.aio.engine import ENGINE_MOVES, UNREGISTERED, EngineState, MemoryRange, RequestHandle
from infinity.aio.files import DirectFile
from infinity.aio.outstanding import Outstanding
from infinity.aio.pieces import Piece, PieceHandle, PieceQueue, Step, require_sizes
from infinity.aio.reopened import Reopened
from infinity.aio.request import Op, Request
from infinity.aio.workers import Workers
from infinity.errors import IllegalTransition, PlatformError
from infinity.handles import Promise
from infinity.states import Lifecycle

# More threads that copy to and from the page cache wait for each other only.
_MAX_THREADS = 32


class BufferedEngine:
    """Moves up to `queue_depth` pieces at a time (32 at most) through the page cache, and lets that forget them afterwards.

    One thread runs the event loop, and everything below "on the loop" is its alone; aiofiles makes the system calls in the
    threads of `executor`.
    """

    name = "buffered"
    facts = UNREGISTERED

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Workers, num_at_once: int, pieces: PieceQueue) -> None:
        self._loop = loop
        self._executor = executor
        self._num_at_once = num_at_once
        self._outstanding = Outstanding()
        self._lifecycle = Lifecycle("buffered engine", EngineState.OPEN, ENGINE_MOVES)
        self._order = threading.Lock()  # nothing is handed to the loop behind the close
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="infinity-aio", daemon=True)
        # On the loop.
        self._pieces = pieces
        self._files: dict[DirectFile, Reopened] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._over = asyncio.Event()

    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError where there is no thread to be had."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """See Engine.submit."""
        handles = [PieceHandle(request, self._outstanding) for request in requests]
        with self._order:
            if self._lifecycle.state is EngineState.CLOSED:
                raise IllegalTransition("buffered engine: it is CLOSED and takes no requests.")
            self._loop.call_soon_threadsafe(self._accept, handles)
        self._outstanding.add(handles)
        return list[RequestHandle](handles)

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register: there is nothing to register."""

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister: closes what it has opened of these files, whose space is free only then."""
        forgotten: Promise[None] = Promise()
        with self._order:
            if self._lifecycle.state is EngineState.CLOSED:
                return
            self._loop.call_soon_threadsafe(self._start, self._forget(files, forgotten))
        forgotten.wait()

    def close(self) -> None:
        """See Engine.close."""
        with self._closing:
            with self._order:
                if self._lifecycle.state is EngineState.CLOSED:
                    return
                self._lifecycle.to(EngineState.CLOSED)
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join()
            self._executor.shutdown()
        self._outstanding.raise_failures()

    def _run(self) -> None:
        self._loop.run_until_complete(self._until_over())
        self._loop.close()

    # On the loop.

    async def _until_over(self) -> None:
        await self._over.wait()
        for opened in self._files.values():
            await opened.close()

    def _accept(self, handles: Sequence[PieceHandle]) -> None:
        for handle in handles:
            if self._pieces.add(handle):
                handle.finish()
        self._go_on()

    def _end(self) -> None:
        self._ending = True
        for handle in self._pieces.cancel_unissued():
            handle.finish()
        self._go_on()

    def _go_on(self) -> None:
        """Start as many pieces as may move; when all is done and the engine is ending, end it."""
        while len(self._tasks) < self._num_at_once and (piece := self._pieces.take()) is not None:
            self._start(self._move(piece))
        if self._ending and not self._tasks:
            self._over.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._retire)

    def _retire(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._go_on()

    async def _move(self, piece: Piece) -> None:
        step = Step.AGAIN
        while step is Step.AGAIN:
            step = self._pieces.complete(piece, await self._attempt(piece))
        if step is Step.REQUEST_OVER:
            await self._finish(piece.handle)

    async def _attempt(self, piece: Piece) -> int:
        """Move the piece as far as one call goes; return the number of bytes moved, or -errno."""
        request = piece.handle.request
        memory = (ctypes.c_char * piece.length).from_address(piece.address)
        try:
            async with self._opened(request.file).lend() as file:
                await file.seek(piece.offset)
                moved: int | None = await (file.readinto(memory) if request.op is Op.READ else file.write(memory))
        except OSError as error:
            return -(error.errno or errno.EIO)
        except ValueError:  # what Python says of a closed file
            return -errno.EBADF
        except RuntimeError:  # the executor's answer while the interpreter ends
            return -errno.ECANCELED
        return -errno.EAGAIN if moved is None else moved

    def _opened(self, file: DirectFile) -> Reopened:
        if file.fd < 0:
            raise ValueError(f"{file.path} is closed")
        if file not in self._files:
            for closed in [known for known in self._files if known.fd < 0]:
                self._start(self._files.pop(closed).close())
            self._files[file] = Reopened(file, self._executor, self._num_at_once)
        return self._files[file]

    async def _finish(self, handle: PieceHandle) -> None:
        request = handle.request
        if not (handle.code or request.file.in_memory):
            with suppress(RuntimeError):  # the interpreter ends, and the cache is the system's
                await self._loop.run_in_executor(self._executor, request.file.drop_cache, request.offset, request.length)
        handle.finish()

    async def _forget(self, files: Sequence[DirectFile], forgotten: Promise[None]) -> None:
        try:
            for file in files:
                if (opened := self._files.pop(file, None)) is not None:
                    await opened.close()
        finally:
            forgotten.resolve(None)


def open_buffered(*, queue_depth: int, block_bytes: int, faults: Mapping[int, int] | None = None) -> BufferedEngine:
    """Open the engine; the arguments are those of `open_uring`.

    Raises PlatformError for sizes that it does not take, and where its threads or descriptors cannot be had.
    """
    require_sizes(queue_depth, block_bytes)
    num_at_once = min(queue_depth, _MAX_THREADS)
    with ExitStack() as undo:
        try:
            executor = Workers(num_at_once)
            undo.callback(executor.shutdown)
            executor.start()
            loop = asyncio.new_event_loop()
            undo.callback(loop.close)
            engine = BufferedEngine(loop, executor, num_at_once, PieceQueue(block_bytes, faults or {}))
            engine.start()
        except (RuntimeError, OSError) as error:
            raise PlatformError(
                f"The buffered engine cannot be used: {error}.",
                remedy="Raise the limits of the process (`ulimit -u`, `ulimit -n`), or lower aio.queue_depth.",
            ) from error
        undo.pop_all()
    return engine
