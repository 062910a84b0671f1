"""An engine that goes wrong on request: for rehearsing what a bad disk does to everything above it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from infinity.aio.engine import Engine, EngineFacts, MemoryRange, RequestHandle
from infinity.aio.failures import END_OF_FILE
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request, address_of, request_error
from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.errors import StorageError


class FaultKind(Enum):
    """What happens to a request that a fault applies to."""

    DELAY = auto()  # it ends `delay_seconds` later than it would
    ERROR = auto()  # nothing is moved, it fails with `errno`
    SHORT = auto()  # only whole pages of its first half are moved, then it fails with `errno`: a torn write
    END = auto()  # only whole pages of its first half are moved, then the file ends
    CORRUPT = auto()  # it goes well, but one bit of its middle byte is flipped


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault for every request that `applies` to; `applies` runs once a request, in order of submission."""

    kind: FaultKind
    applies: Callable[[Request], bool]
    errno: int = errno.EIO
    delay_seconds: float = 0.0


class FaultyEngine:
    """Wraps an engine; the first fault that applies to a request decides, and other requests pass unchanged."""

    def __init__(self, engine: Engine, faults: Sequence[Fault]) -> None:
        self.name = engine.name
        self._engine = engine
        self._faults = tuple(faults)
        self._lock = threading.Lock()

    @property
    def facts(self) -> EngineFacts:
        """See Engine.facts."""
        return self._engine.facts

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register."""
        self._engine.register(files=files, memory=memory)

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister."""
        self._engine.unregister(files=files, memory=memory)

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """See Engine.submit."""
        with self._lock:
            return [self._submit(request) for request in requests]

    def close(self) -> None:
        """See Engine.close; failures that this wrapper made up are not reported."""
        self._engine.close()

    def _submit(self, request: Request) -> RequestHandle:
        fault = next((fault for fault in self._faults if fault.applies(request)), None)
        if fault is None:
            return self._pass_on(request)
        if fault.kind is FaultKind.DELAY:
            return _Altered(self._pass_on(request), delay_seconds=fault.delay_seconds)
        if fault.kind is FaultKind.CORRUPT:
            if request.op is Op.WRITE:
                return self._pass_on(_corrupted_copy(request))
            return _Altered(self._pass_on(request), after=lambda: _flip_bit(request.address + request.length // 2))
        moved = 0 if fault.kind is FaultKind.ERROR else request.length // 2 // PAGE_BYTES * PAGE_BYTES
        code = END_OF_FILE if fault.kind is FaultKind.END else -fault.errno
        part = Request(request.op, request.file, request.offset, request.address, moved, request.keep)
        return _Altered(self._pass_on(part), failure=request_error(request, code, request.offset + moved))

    def _pass_on(self, request: Request) -> RequestHandle:
        return self._engine.submit([request])[0]


class _Altered:
    """A handle that ends later than the engine's, after a change to the buffer, or with a failure."""

    def __init__(
        self,
        handle: RequestHandle,
        *,
        delay_seconds: float = 0.0,
        after: Callable[[], None] | None = None,
        failure: StorageError | None = None,
    ) -> None:
        self._handle = handle
        self._delay_nanoseconds = round(delay_seconds * 1e9)
        self._ends_at = time.monotonic() + delay_seconds
        self._after = after
        self._failure = failure
        self._lock = threading.Lock()

    @property
    def latency_nanoseconds(self) -> int | None:
        """See RequestHandle.latency_nanoseconds; at least the delay."""
        latency = self._handle.latency_nanoseconds
        return max(latency, self._delay_nanoseconds) if latency is not None and self.done() else None

    def done(self) -> bool:
        return self._handle.done() and time.monotonic() >= self._ends_at

    def wait(self) -> None:
        self._handle.wait()
        time.sleep(max(self._ends_at - time.monotonic(), 0.0))
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                after()
        if self._failure is not None:
            raise self._failure


def _flip_bit(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 1


def _corrupted_copy(request: Request) -> Request:
    memory = mmap.mmap(-1, round_up(max(request.length, 1), PAGE_BYTES))
    address = address_of(memory)
    ctypes.memmove(address, request.address, request.length)
    _flip_bit(address + request.length // 2)
    return Request(request.op, request.file, request.offset, address, request.length, memory)
