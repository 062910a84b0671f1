"""The io_uring engine: hands requests to the C thread of csrc/aio and waits for them without the GIL."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from infinity.aio.engine import ENGINE_MOVES, EngineFacts, EngineState, MemoryRange, RequestHandle
from infinity.aio.files import DirectFile
from infinity.aio.native import NativeEngine
from infinity.aio.native import ffi as _ffi
from infinity.aio.native import import_error as _import_error
from infinity.aio.native import lib as _lib
from infinity.aio.registration import Registration
from infinity.aio.request import Request
from infinity.aio.submissions import Batch, Submissions, UringHandle
from infinity.byte_sizes import KIB, format_bytes, round_up
from infinity.errors import IllegalTransition, PlatformError, StorageError
from infinity.states import Lifecycle

_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")


class UringEngine:
    """Requests on one ring. Any thread may submit; after `close` handles still give their results.

    An engine does not survive a fork: the child has neither its thread nor a use for its ring.
    """

    name = "uring"

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self._registration = Registration(native)
        self._submissions = Submissions()
        self._lifecycle = Lifecycle("io_uring engine", EngineState.OPEN, ENGINE_MOVES)
        self._closing = threading.Lock()

    @property
    def facts(self) -> EngineFacts:
        """See Engine.facts."""
        return self._registration.facts()

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register. Memory is brought in and stays until it is unregistered; files are the ring's until then."""
        self._registration.add(files, memory)

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister."""
        if self._native.has_thread():
            self._registration.remove(files, memory)

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """See Engine.submit."""
        batch = Batch(requests, self._native, self._submissions)
        batch.fill(self._registration.tickets)
        if batch.requests:  # before the kernel can touch a buffer, so that nothing in between lets go of one
            self._submissions.add(batch)
        code = batch.submit()
        if code:
            self._submissions.discard(batch)
            raise _no_more(code)
        return [UringHandle(batch, index) for index in range(len(batch.requests))]

    def close(self) -> None:
        """See Engine.close."""
        with self._closing:
            if self._lifecycle.state is EngineState.CLOSED:
                return
            self._lifecycle.to(EngineState.CLOSED)
            if not self._native.close():
                return
        self._submissions.raise_failures()

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
            remedy="Install liburing 2.3 or newer with its headers and install infinity again.",
        )
    table = _ffi.new("aio_fault[]", list((faults or {}).items()))
    opened = _ffi.new("aio_engine **")
    code = _lib.aio_open(queue_depth, block_bytes, table, len(table), opened)
    if code:
        raise _refusal(-code, queue_depth)
    return UringEngine(NativeEngine(opened[0], os.getpid()))


def _no_more(code: int) -> IllegalTransition | StorageError:
    if code == -errno.ESHUTDOWN:
        return IllegalTransition("io_uring engine: it is CLOSED and takes no requests.")
    return StorageError(
        f"io_uring takes no requests any more: {os.strerror(-code)} (errno {-code}).",
        remedy='Use the engine "threads".',
        errno=-code,
    )


def _refusal(number: int, queue_depth: int) -> PlatformError:
    """Return the error that says why there is no ring, and how to get one."""
    message = f"io_uring cannot be used: {os.strerror(number)} (errno {number})"
    if number in (errno.EPERM, errno.EACCES):
        return PlatformError(
            f"{message}, it is denied by {_who_denies()}.",
            remedy="In a container add `--security-opt seccomp=unconfined` (or a seccomp profile with io_uring); "
            "on the host `sysctl kernel.io_uring_disabled=0`.",
            errno=number,
        )
    if number == errno.ENOSYS:
        return PlatformError(
            f"{message}, neither the kernel nor its seccomp filter has it.",
            remedy="Use Linux 5.6 or newer; in a container add `--security-opt seccomp=unconfined`.",
            errno=number,
        )
    if number == errno.ENOMEM:
        needed = _ring_bytes(queue_depth)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        current = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return PlatformError(
            f"{message}: it needs about {format_bytes(needed)} of locked memory, the limit is {current}.",
            remedy=f"Raise it with `ulimit -l {needed // KIB}` (in a container `--ulimit memlock={needed}`).",
            errno=number,
        )
    if number == errno.EINVAL:
        return PlatformError(f"{message}.", remedy="The queue depth is 1 to 4096 and the block at most 1 GiB.", errno=number)
    return PlatformError(f"{message}.", remedy="Raise the limits of the process (open files, threads).", errno=number)


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
