"""A compute device with memory of its own, played by the CPU: copies end as late or as early as they may, and are judged.

Kernels run when they are queued, as always on the CPU, so what a real device would do behind their back is checked instead:
a host buffer is not changed before the copy from it has ended, and a device buffer is not refilled behind an earlier point
of the compute stream than its last use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import infinity.engine.build as build
import infinity.engine.reserve as reserve
from infinity.byte_sizes import GIB, MIB
from infinity.engine.update import Updater
from infinity.memory.device import ComputeDevice, device_bytes
from infinity.memory.transfer import Mark, Upload
from infinity.optim.stream import UpdateStream
from infinity.zero.weights import Slot, Weights

POLLS_UNTIL_DONE = 2


@dataclass(frozen=True)
class Reached:
    """A point of the compute stream: the work before it was queued by the time that the number was the clock's."""

    number: int

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


@dataclass
class Copy:
    """A copy that was asked for. `ran`: the bytes are there. `ended`: the host knows it."""

    source: torch.Tensor
    destination: torch.Tensor
    ran: bool = False
    ended: bool = False
    num_polls: int = 0

    def overlaps_source(self, address: int, num_bytes: int) -> bool:
        start = self.source.data_ptr()
        return start < address + num_bytes and address < start + self.source.nbytes


@dataclass
class End:
    """The host's handle on a copy: it ends when it is waited for, or when it has been asked about a few times."""

    transfers: FakeTransfers
    copy: Copy

    def wait(self) -> None:
        self.transfers.run(self.copy)
        self.copy.ended = True
        self.transfers.log.append(("ended", self.copy.source.data_ptr(), self.copy.destination.data_ptr()))

    def done(self) -> bool:
        self.copy.num_polls += 1
        if not self.copy.ended and self.copy.num_polls >= POLLS_UNTIL_DONE:
            self.wait()
        return self.copy.ended


@dataclass
class Arrival:
    """The compute stream's handle: the device sees the bytes, the host does not know that the copy has ended."""

    transfers: FakeTransfers
    copy: Copy

    def wait(self) -> None:
        self.transfers.run(self.copy)

    def done(self) -> bool:
        return self.copy.ended


@dataclass
class FakeTransfers:
    """Copies that run at once (`late` False) or when somebody needs them, each direction in order."""

    late: bool
    log: list[tuple[Any, ...]] = field(default_factory=list)
    clock: int = 0
    queues: dict[str, list[Copy]] = field(default_factory=lambda: {"in": [], "out": []})
    last_use: dict[int, int] = field(default_factory=dict)  # by device address: the clock when it was used last
    in_use: dict[int, int] = field(default_factory=dict)  # by device address: how many hold it

    def mark(self) -> Mark:
        self.clock += 1
        return Mark(Reached(self.clock))

    def to_device(self, host: torch.Tensor, device: torch.Tensor, *, after: Mark | None = None) -> Upload:
        point = (after or self.mark()).event
        assert isinstance(point, Reached)
        address = device.data_ptr()
        assert not self.in_use.get(address), "a device buffer is refilled while it is in use"
        assert point.number > self.last_use.get(address, 0), "a device buffer is refilled before its last use has ended"
        copy = self._queued("in", host, device)
        return Upload(Arrival(self, copy), End(self, copy))

    def to_host(self, device: torch.Tensor, host: torch.Tensor) -> End:
        return End(self, self._queued("out", device, host))

    def synchronize(self) -> None:
        for queue in self.queues.values():
            for copy in list(queue):
                End(self, copy).wait()

    def run(self, copy: Copy) -> None:
        """Make the copy, and those before it in the same direction."""
        queue = next(queue for queue in self.queues.values() if any(one is copy for one in queue))
        for earlier in queue:
            if not earlier.ran:
                earlier.destination.copy_(earlier.source)
                earlier.ran = True
            if earlier is copy:
                return

    def require_free(self, address: int, num_bytes: int) -> None:
        """Fail while a copy from these bytes of host memory may still be running."""
        running = [copy for copy in self.queues["in"] if not copy.ended and copy.overlaps_source(address, num_bytes)]
        assert not running, "a host buffer is changed while it is copied to the device"

    def _queued(self, direction: str, source: torch.Tensor, destination: torch.Tensor) -> Copy:
        assert source.data_ptr() != destination.data_ptr(), "the device's memory is not the host's"
        assert (source.shape, source.dtype) == (destination.shape, destination.dtype)
        copy = Copy(source, destination)
        self.queues[direction].append(copy)
        self.log.append((direction, source.data_ptr(), destination.data_ptr()))
        if not self.late:
            self.run(copy)
        return copy


@dataclass
class FakeMemory:
    """A device's allocator that says what the test wants."""

    free: int = GIB
    allocated: int = 0
    peak: int = 0

    def free_bytes(self) -> int:
        return self.free

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated


def poisoned(num_bytes: int, **where: Any) -> torch.Tensor:
    """Device memory full of NaN: who computes with it before anything was copied there is found out."""
    return device_bytes(num_bytes, **where).fill_(0xFF)


def install(monkeypatch: pytest.MonkeyPatch, *, late: bool, free_bytes: int = 64 * MIB) -> FakeTransfers:
    """Let engines that are made from now on compute on a separate device; return its copies."""
    transfers = FakeTransfers(late)
    compute = ComputeDevice(torch.device("cpu"), transfers, FakeMemory(free_bytes))
    monkeypatch.setattr(build, "open_compute_device", lambda: compute)
    monkeypatch.setattr(reserve, "device_bytes", poisoned)
    acquire, release, forget = Weights.acquire, Weights.release, Weights.forget
    load, step = UpdateStream.load, Updater.step

    def slot_of(weights: Weights, shard: int) -> Slot:
        slot = weights._slot_of(shard)
        assert slot is not None
        return slot

    def watched_acquire(weights: Weights, shard: int) -> Any:
        transfers.log.append(("acquire", shard))
        views = acquire(weights, shard)
        address = slot_of(weights, shard).device.data_ptr()
        transfers.in_use[address] = transfers.in_use.get(address, 0) + 1
        return views

    def watched_release(weights: Weights, shard: int) -> None:
        address = slot_of(weights, shard).device.data_ptr()
        transfers.in_use[address] -= 1
        transfers.last_use[address] = transfers.clock
        release(weights, shard)
        transfers.log.append(("release", shard))

    def watched_load(stream: UpdateStream, shard: int, weights: Any, *, fetch: bool) -> Any:
        transfers.require_free(weights.address, weights.num_bytes)
        return load(stream, shard, weights, fetch=fetch)

    def watched_step(updater: Updater, *arguments: Any) -> Any:
        for slot in updater._weights._kept.values():  # ordinary autograd used them up to the end of backward
            transfers.last_use[slot.device.data_ptr()] = transfers.clock
        return step(updater, *arguments)

    def watched_forget(weights: Weights) -> None:
        for slot in (*weights._slots, *weights._kept.values()):  # whatever ran before, aborted steps included
            transfers.last_use[slot.device.data_ptr()] = transfers.clock
        forget(weights)
        assert all(copy.ended for copy in transfers.queues["in"]), "host buffers are changed while they are copied"

    monkeypatch.setattr(Weights, "forget", watched_forget)
    monkeypatch.setattr(Weights, "acquire", watched_acquire)
    monkeypatch.setattr(Weights, "release", watched_release)
    monkeypatch.setattr(UpdateStream, "load", watched_load)
    monkeypatch.setattr(Updater, "step", watched_step)
    return transfers
