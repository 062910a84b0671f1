"""Copies between host memory and the compute device, beside the computation. The only file that knows CUDA streams.

Every copy to the device waits until its destination is free: either for all work queued on the compute stream so far
(always right, but it never overlaps with that work) or, with `after`, for the point at which the caller marked the
destination's last use. Every copy to the host waits for all work queued so far, for that work makes what is copied.
Nothing else waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from infinity.errors import PlatformError
from infinity.handles import Handle, Ready


class Event(Protocol):
    """A CUDA event as torch has it."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    """A CUDA stream as torch has it."""

    def wait_event(self, event: Event) -> None: ...

    def record_event(self) -> Event: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CudaApi:
    """The few calls that copies need; `torch_cuda` gives torch's own."""

    new_stream: Callable[[], Stream]
    current_stream: Callable[[], Stream]  # of the calling thread: the compute stream
    use_stream: Callable[[Stream], AbstractContextManager[object]]
    record_stream: Callable[[torch.Tensor, Stream], None]  # the allocator reuses the memory only when the stream is done


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the compute stream; without an event it has been reached."""

    event: Event | None


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy to the device. Two parties wait for it, for different things."""

    arrived: Handle[None]  # `wait` orders the caller's compute stream behind the copy and does not block the host
    source_free: Handle[None]  # `wait` blocks the host until the source may be changed: a lease is released after it

    def wait(self) -> None:
        """Let work that the caller queues from now on see the copied values."""
        self.arrived.wait()

    def done(self) -> bool:
        """Return whether the copy has ended."""
        return self.source_free.done()


class Transfers(Protocol):
    """Copies between tensors of equal shape and dtype. Both are kept alive until the copy has ended."""

    def mark(self) -> Mark:
        """Return the point in the compute stream that all work queued so far ends at."""
        ...

    def to_device(self, host: torch.Tensor, device: torch.Tensor, *, after: Mark | None = None) -> Upload:
        """Copy host memory to the device, once the work before `after` (default: all work queued so far) has ended."""
        ...

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> Handle[None]:
        """Copy device memory to the host once all work queued so far has ended; `wait` blocks the host until it is there."""
        ...

    def synchronize(self) -> None:
        """Block the host until every copy has ended."""
        ...


_READY: Ready[None] = Ready(None)
_UPLOADED = Upload(_READY, _READY)
_REACHED = Mark(None)


class HostTransfers:
    """The CPU plays the device: copies are made at once, and none where both sides are the same memory."""

    def mark(self) -> Mark:
        return _REACHED

    def to_device(self, host: torch.Tensor, device: torch.Tensor, *, after: Mark | None = None) -> Upload:
        _copy_unless_shared(host, device)
        return _UPLOADED

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> Handle[None]:
        _copy_unless_shared(device, host)
        return _READY

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def _copy_unless_shared(source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.data_ptr() != destination.data_ptr():
        destination.copy_(source)


@dataclass(frozen=True, slots=True)
class HostWait:
    """Waits on the host for the event behind a copy; keeps the host's side of it alive."""

    event: Event
    host: torch.Tensor

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Lets the waiting thread's compute stream wait for the event behind a copy; the host goes on."""

    event: Event
    current_stream: Callable[[], Stream]

    def wait(self) -> None:
        self.current_stream().wait_event(self.event)

    def done(self) -> bool:
        return self.event.query()


class CudaTransfers:
    """Two side streams, one per direction. Safe to use from any thread; the compute stream is the calling thread's.

    Host memory that is not page-locked works too, but then the copy blocks the host.
    """

    def __init__(self, cuda: CudaApi, to_device_stream: Stream, to_host_stream: Stream) -> None:
        self._cuda = cuda
        self._to_device_stream = to_device_stream
        self._to_host_stream = to_host_stream
        self._lock = threading.Lock()
        self._running: deque[HostWait] = deque()  # keeps host memory alive when a caller drops its handle

    def mark(self) -> Mark:
        return Mark(self._cuda.current_stream().record_event())

    def to_device(self, host: torch.Tensor, device: torch.Tensor, *, after: Mark | None = None) -> Upload:
        copied = self._copy(self._to_device_stream, host, device, after or self.mark(), host=host, device=device)
        return Upload(StreamWait(copied.event, self._cuda.current_stream), copied)

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> Handle[None]:
        return self._copy(self._to_host_stream, device, host, self.mark(), host=host, device=device)

    def synchronize(self) -> None:
        self._to_device_stream.synchronize()
        self._to_host_stream.synchronize()
        with self._lock:
            self._forget_ended()

    def _copy(
        self,
        stream: Stream,
        source: torch.Tensor,
        destination: torch.Tensor,
        start: Mark,
        *,
        host: torch.Tensor,
        device: torch.Tensor,
    ) -> HostWait:
        with self._lock:
            if start.event is not None:
                stream.wait_event(start.event)
            with self._cuda.use_stream(stream):
                destination.copy_(source, non_blocking=True)
            copied = HostWait(stream.record_event(), host)
            self._cuda.record_stream(device, stream)
            self._forget_ended()
            self._running.append(copied)
        return copied

    def _forget_ended(self) -> None:
        while self._running and self._running[0].done():
            self._running.popleft()


def torch_cuda(device: torch.device) -> CudaApi:
    """Return torch's own CUDA calls for `device`."""

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(torch.Stream, stream))

    return CudaApi(
        new_stream=lambda: cast(Stream, torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        current_stream=lambda: cast(Stream, torch.cuda.current_stream(device)),
        use_stream=lambda stream: torch.cuda.stream(cast(torch.cuda.Stream, stream)),
        record_stream=record_stream,
    )


def open_transfers(device: torch.device, *, cuda: CudaApi | None = None) -> Transfers:
    """Return the transfers for `device`; `cuda` is torch's own unless given. Raises PlatformError for other devices."""
    if device.type == "cpu":
        return HostTransfers()
    if device.type != "cuda":
        raise PlatformError(
            f"Compute device {device}: there are no transfers for {device.type!r}.",
            remedy="Use a device of kind cuda or cpu.",
        )
    api = cuda or torch_cuda(device)
    return CudaTransfers(api, api.new_stream(), api.new_stream())
