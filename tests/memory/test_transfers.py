"""Transfers: what is copied, and in which order streams, events and the host wait for each other."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from infinity.errors import PlatformError
from infinity.memory.transfer import CudaApi, CudaTransfers, HostTransfers, open_transfers


class FakeEvent:
    """An event that is over when the test says so."""

    def __init__(self, log: list, name: str) -> None:
        self.log = log
        self.name = name
        self.over = False

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.over = True

    def query(self) -> bool:
        return self.over


class FakeStream:
    """A stream that writes down what is queued on it; its events are named after it and numbered."""

    def __init__(self, log: list, name: str) -> None:
        self.log = log
        self.name = name
        self.events: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent(self.log, f"{self.name}.{len(self.events)}"))
        self.log.append(f"{self.name} records {self.events[-1].name}")
        return self.events[-1]

    def synchronize(self) -> None:
        self.log.append(f"host waits for all of {self.name}")
        for event in self.events:
            event.over = True


class FakeCuda:
    """CUDA with a compute stream and as many side streams as are made: "in", then "out"."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = FakeStream(self.log, "compute")
        self.names = iter(("in", "out"))
        self.streams: dict[str, FakeStream] = {}

    def api(self) -> CudaApi:
        return CudaApi(
            new_stream=self.new_stream,
            current_stream=lambda: self.compute,
            use_stream=self.use_stream,
            record_stream=lambda tensor, stream: self.log.append(f"allocator keeps {tuple(tensor.shape)} for {stream.name}"),
        )

    def new_stream(self) -> FakeStream:
        name = next(self.names)
        self.streams[name] = FakeStream(self.log, name)
        return self.streams[name]

    @contextmanager
    def use_stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}:")
        yield
        self.log.append(f"off {stream.name}")


class WatchedTensor(torch.Tensor):
    """A tensor that writes down that it is copied into, with the arguments that matter."""

    @staticmethod
    def of(log: list, numel: int) -> "WatchedTensor":
        tensor = torch.zeros(numel).as_subclass(WatchedTensor)
        tensor.log = log
        return tensor

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        self.log.append("copies without blocking" if non_blocking else "copies")
        return super().copy_(source)


def cuda_transfers() -> tuple[CudaTransfers, FakeCuda]:
    """Open CUDA transfers over a fake."""
    cuda = FakeCuda()
    transfers = open_transfers(torch.device("cuda", 0), cuda=cuda.api())
    assert isinstance(transfers, CudaTransfers)
    return transfers, cuda


def test_to_device_queues_behind_the_compute_stream_and_records_after_the_copy() -> None:
    """The copy starts after all work queued so far, its event comes after it, and the host waits for nothing."""
    transfers, cuda = cuda_transfers()
    device, host = WatchedTensor.of(cuda.log, 3), torch.arange(3.0)
    upload = transfers.to_device(host, device)
    assert cuda.log == [
        "compute records compute.0",
        "in waits for compute.0",
        "on in:",
        "copies without blocking",
        "off in",
        "in records in.0",
        "allocator keeps (3,) for in",
    ]
    assert device.tolist() == [0, 1, 2]
    cuda.log.clear()
    assert not upload.done()
    upload.wait()
    assert cuda.log == ["compute waits for in.0"]
    assert not upload.source_free.done()
    upload.source_free.wait()
    assert cuda.log[1:] == ["host waits for in.0"]
    assert upload.done()


def test_a_mark_lets_the_copy_overlap_with_later_work() -> None:
    """With the mark of the destination's last use the copy waits for that point and for nothing queued since."""
    transfers, cuda = cuda_transfers()
    last_use = transfers.mark()
    cuda.compute.record_event()
    cuda.log.clear()
    transfers.to_device(torch.ones(2), WatchedTensor.of(cuda.log, 2), after=last_use)
    assert cuda.log[:2] == ["in waits for compute.0", "on in:"]


def test_to_host_waits_for_the_work_that_makes_its_source_and_blocks_the_host_only_in_wait() -> None:
    """The copy out runs on its own stream behind the compute stream; only `wait` blocks anybody."""
    transfers, cuda = cuda_transfers()
    host = WatchedTensor.of(cuda.log, 4)
    handle = transfers.to_host(torch.full((4,), 7.0), host)
    assert cuda.log == [
        "compute records compute.0",
        "out waits for compute.0",
        "on out:",
        "copies without blocking",
        "off out",
        "out records out.0",
        "allocator keeps (4,) for out",
    ]
    assert not handle.done()
    handle.wait()
    handle.wait()
    assert cuda.log[7:] == ["host waits for out.0"] * 2
    assert host.tolist() == [7, 7, 7, 7]


def test_host_memory_lives_until_its_copy_has_ended() -> None:
    """A caller may drop tensors and handle at once; the memory goes when a later call finds the copy over."""
    transfers, cuda = cuda_transfers()
    host = torch.ones(8)
    gone = weakref.ref(host)
    transfers.to_device(host, torch.zeros(8))
    del host
    gc.collect()
    assert gone() is not None
    transfers.to_device(torch.ones(1), torch.zeros(1))
    gc.collect()
    assert gone() is not None
    transfers.synchronize()
    gc.collect()
    assert gone() is None
    assert cuda.log[-2:] == ["host waits for all of in", "host waits for all of out"]


def test_on_the_cpu_copies_are_made_at_once() -> None:
    """Where the CPU plays the device, the bytes are there when the call returns and every handle is done."""
    transfers = open_transfers(torch.device("cpu"))
    assert isinstance(transfers, HostTransfers)
    host, device = torch.randn(5).bfloat16(), torch.zeros(5, dtype=torch.bfloat16)
    upload = transfers.to_device(host, device, after=transfers.mark())
    assert upload.done()
    assert upload.source_free.done()
    upload.wait()
    assert torch.equal(device.view(torch.int16), host.view(torch.int16))
    back = torch.zeros_like(host)
    handle = transfers.to_host(device, back)
    assert handle.done()
    handle.wait()
    assert torch.equal(back.view(torch.int16), host.view(torch.int16))
    transfers.synchronize()


def test_on_the_cpu_shared_memory_is_not_copied() -> None:
    """Two tensors over the same bytes need no copy in either direction."""
    log: list[str] = []
    device = WatchedTensor.of(log, 4)
    host = device.view(4)
    host.log = log
    transfers = open_transfers(torch.device("cpu"))
    transfers.to_device(host, device)
    transfers.to_host(device, host)
    assert log == []
    transfers.to_device(torch.ones(4), device)
    assert log == ["copies"]


def test_other_devices_are_refused() -> None:
    """A device that nobody wrote transfers for is named."""
    with pytest.raises(PlatformError, match="'meta'"):
        open_transfers(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_round_trip_over_a_real_device() -> None:
    """What goes to the device and back is the same bit for bit, also when buffers are reused at once."""
    device = torch.device("cuda", 0)
    transfers = open_transfers(device)
    host = torch.randn(1 << 20).pin_memory()
    there, back = torch.empty(1 << 20, device=device), torch.empty(1 << 20).pin_memory()
    for _ in range(5):
        expected = host.clone()
        upload = transfers.to_device(host, there)
        upload.wait()
        result = there * 2
        upload.source_free.wait()
        host.normal_()
        transfers.to_host(result, back).wait()
        assert torch.equal(back, expected * 2)
    transfers.synchronize()
