"""The io_uring engine: hands requests to the C thread of csrc/aio and waits for them without the GIL."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.aio.engine import ENGINE_MOVES, UNREGISTERED, EngineState, MemoryRange
from infinity.aio.files import DirectFile
from infinity.aio.outstanding import Outstanding
from infinity.aio.request import Op, Request, RequestState, request_error
from infinity.byte_sizes import KIB, format_bytes, round_up
from infinity.errors import IllegalTransition, PlatformError, StorageError
from infinity.handles import Handle
from infinity.states import Lifecycle

try:
    from infinity._aio import ffi as _ffi
    from infinity._aio import lib as _lib
except ImportError as error:
    _ffi = _lib = None
    _import_error = str(error)

# Signals reach Python's handlers between two waits.
_WAIT_MILLISECONDS = 500
_OVER = int(RequestState.DONE)
_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")


class NativeEngine:
    """Owns the C engine: closed once, then freed.

    Not left to a destructor of cffi: of the objects in a cycle the garbage collector may finalise the pointer first, and the
    C thread would go on in freed memory.
    """

    __slots__ = ("_closed", "_closing", "_owner_pid", "pointer")

    def __init__(self, pointer: Any, owner_pid: int) -> None:
        self.pointer = pointer  # aio_engine *
        self._owner_pid = owner_pid
        self._closed = False
        self._closing = threading.Lock()

    def close(self) -> bool:
        """Finish what is in flight and end the thread; return False in a forked child, which has no thread to join."""
        if os.getpid() != self._owner_pid:
            return False
        with self._closing:
            if not self._closed:
                _lib.aio_close(self.pointer)
            self._closed = True
        return True

    def __del__(self) -> None:
        self.close()
        _lib.aio_free(self.pointer)


class UringHandle:
    """The handle of one request at the C engine."""

    __slots__ = ("_batch", "_engine", "_failure", "_native", "_outstanding", "_settled", "request")

    def __init__(self, request: Request, batch: Any, index: int, engine: NativeEngine, outstanding: Outstanding) -> None:
        self.request = request
        self._batch = batch  # aio_request[]: owns the memory of every request of one submission
        self._native = batch[index]  # aio_request &
        self._engine = engine
        self._outstanding = outstanding
        self._settled = False
        self._failure: StorageError | None = None

    @property
    def state(self) -> RequestState:
        return RequestState(self._native.state)

    def done(self) -> bool:
        return bool(self._native.state >= _OVER)

    def wait(self) -> None:
        if not self._settled:
            pointer = _ffi.addressof(self._native)
            while not _lib.aio_wait(self._engine.pointer, pointer, _WAIT_MILLISECONDS):
                pass
            self.failure()
            self._outstanding.notice(self)
        if self._failure is not None:
            raise self._failure

    def failure(self) -> StorageError | None:
        """Return why the request failed; only once `done`. Two threads at once do the same twice, which is harmless."""
        if not self._settled:
            request, code = self.request, self._native.code
            if code:
                self._failure = request_error(request, code, self._native.failed_offset)
            elif not request.file.direct:
                request.file.drop_cache(request.offset, request.length)
            self._settled = True
        return self._failure


class UringEngine:
    """Requests on one ring. Any thread may submit; after `close` handles still give their results.

    An engine does not survive a fork: the child has neither its thread nor a use for its ring.
    """

    name = "uring"
    facts = UNREGISTERED

    def __init__(self, native: NativeEngine, outstanding: Outstanding) -> None:
        self._native = native
        self._outstanding = outstanding
        self._lifecycle = Lifecycle("io_uring engine", EngineState.OPEN, ENGINE_MOVES)
        self._closing = threading.Lock()

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        """See Engine.submit."""
        batch = _ffi.new(
            "aio_request[]",
            [((r.file.fd, r.op is Op.WRITE, r.file.granule_bytes, r.offset, r.address, r.length),) for r in requests],
        )
        native, outstanding = self._native, self._outstanding
        handles = [UringHandle(request, batch, index, native, outstanding) for index, request in enumerate(requests)]
        # Before the kernel can touch a buffer, so that nothing that happens in between lets go of one.
        outstanding.add(handles)
        code = _lib.aio_submit(native.pointer, batch, len(handles))
        if code == -errno.ESHUTDOWN:
            raise IllegalTransition("io_uring engine: it is CLOSED and takes no requests.")
        if code:
            raise StorageError(
                f"io_uring takes no requests any more: {os.strerror(-code)} (errno {-code}).",
                remedy='Use the engine "threads".',
                errno=-code,
            )
        return list[Handle[None]](handles)

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register."""

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister."""

    def close(self) -> None:
        """See Engine.close."""
        with self._closing:
            if self._lifecycle.state is EngineState.CLOSED:
                return
            self._lifecycle.to(EngineState.CLOSED)
            if not self._native.close():
                return
        self._outstanding.raise_failures()

    def __del__(self) -> None:
        # The C thread uses memory that only this engine keeps alive, so it ends before that goes.
        self.close()


def open_uring(*, queue_depth: int, block_bytes: int, faults: Mapping[int, int] | None = None) -> UringEngine:
    """Open a ring and its thread; `queue_depth` in 1..4096 pieces, `block_bytes` in 1..2**30.

    `faults` is for tests: the completion with this number, counted from 0, is seen as this result (-errno or bytes moved).
    Raises PlatformError with the remedy where io_uring cannot be had.
    """
    if _lib is None:
        raise PlatformError(
            f"io_uring cannot be used: the native module infinity._aio is missing ({_import_error}).",
            remedy="Install liburing with its headers and install infinity again.",
        )
    table = _ffi.new("aio_fault[]", list((faults or {}).items()))
    opened = _ffi.new("aio_engine **")
    code = _lib.aio_open(queue_depth, block_bytes, table, len(table), opened)
    if code:
        raise _refusal(-code, queue_depth)
    return UringEngine(NativeEngine(opened[0], os.getpid()), Outstanding())


def _refusal(number: int, queue_depth: int) -> PlatformError:
    """Return the error that says why there is no ring, and how to get one."""
    message = f"io_uring cannot be used: {os.strerror(number)} (errno {number})"
    if number in (errno.EPERM, errno.EACCES):
        return PlatformError(
            f"{message}, it is denied by {_who_denies()}.",
            remedy="In a container add `--security-opt seccomp=unconfined` (or a seccomp profile with io_uring); "
            "on the host `sysctl kernel.io_uring_disabled=0`.",
        )
    if number == errno.ENOSYS:
        return PlatformError(
            f"{message}, neither the kernel nor its seccomp filter has it.",
            remedy="Use Linux 5.6 or newer; in a container add `--security-opt seccomp=unconfined`.",
        )
    if number == errno.ENOMEM:
        needed = _ring_bytes(queue_depth)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        current = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return PlatformError(
            f"{message}: it needs about {format_bytes(needed)} of locked memory, the limit is {current}.",
            remedy=f"Raise it with `ulimit -l {needed // KIB}` (in a container `--ulimit memlock={needed}`).",
        )
    if number == errno.EINVAL:
        return PlatformError(f"{message}.", remedy="The queue depth is 1 to 4096 and the block at most 1 GiB.")
    return PlatformError(f"{message}.", remedy="Raise the limits of the process (open files, threads).")


def _who_denies() -> str:
    try:
        value = _SWITCH.read_text().strip()
    except OSError:
        value = "0"
    return "seccomp or another security module" if value == "0" else f"kernel.io_uring_disabled={value}"


def _ring_bytes(queue_depth: int) -> int:
    """Return the memory of a ring: 64 bytes an entry submitted, 4 for its index, twice 16 completed, and a header page."""
    entries = 1 << queue_depth.bit_length()  # the power of two above it, as the wake-up takes an entry too
    return round_up(64 * entries, 4096) + round_up((4 + 2 * 16) * entries, 4096) + 4096
