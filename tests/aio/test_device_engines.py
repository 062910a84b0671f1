"""Several devices: each has an engine of its own, requests find theirs, and one that cannot be had fails nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from aio_cases import Memory, open_kind

from infinity.aio import devices
from infinity.aio.devices import DeviceEngine, open_device_engines
from infinity.aio.engine import Engine, EngineFacts, MemoryRange
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.request import Request
from infinity.errors import IllegalTransition, PlatformError, StorageError
from infinity.handles import AllOf, Handle, Ready


class Recording:
    """An engine that does nothing but remember."""

    name = "threads"

    def __init__(self, facts: EngineFacts | None = None, refuses: bool = False, fails_to_close: bool = False) -> None:
        self.facts = facts or EngineFacts(True, True, ())
        self.submitted: list[Request] = []
        self.registered: list[tuple[list[DirectFile], list[MemoryRange]]] = []
        self.num_closed = 0
        self._refuses = refuses
        self._fails_to_close = fails_to_close

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        self.registered.append((list(files), list(memory)))

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        self.registered.remove((list(files), list(memory)))

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        if self._refuses:
            raise IllegalTransition("refused")
        self.submitted += requests
        return [Numbered(request.offset) for request in requests]

    def close(self) -> None:
        self.num_closed += 1
        if self._fails_to_close:
            raise StorageError("lost a write")


class Numbered(Ready[None]):
    """A handle that knows its request by the offset, and whether somebody waited."""

    def __init__(self, number: int) -> None:
        super().__init__(None)
        self.number = number
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[DirectFile]]:
    """Three files that say that they are on the devices 1, 2 and 3."""
    opened = [open_direct(tmp_path / str(device), create=True) for device in (1, 2, 3)]
    for device, file in enumerate(opened, start=1):
        file.device = device
    yield opened
    for file in opened:
        file.close()


def test_each_request_goes_to_the_engine_of_its_device(files: list[DirectFile]) -> None:
    """Handles come back in the order of the requests; a device without an engine of its own is served by the first."""
    first, second = Recording(), Recording()
    engine = DeviceEngine({1: first, 2: second}, ())
    memory = Memory(4096)
    order = [1, 0, 0, 2, 1]
    handles = engine.submit([memory.read(files[which], number) for number, which in enumerate(order)])
    assert [handle.number for handle in handles] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert [request.offset for request in first.submitted] == [1, 2, 3]
    assert [request.offset for request in second.submitted] == [0, 4]
    assert engine.submit([]) == []
    assert engine.name == "threads"


def test_a_refusal_leaves_nothing_on_its_way(files: list[DirectFile]) -> None:
    """Where the second device's engine refuses, the first one's requests are over before the error is raised."""
    waited: list[Numbered] = []

    class Remembering(Recording):
        def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
            handles = super().submit(requests)
            waited.extend(handle for handle in handles if isinstance(handle, Numbered))
            return handles

    engine = DeviceEngine({1: Remembering(), 2: Recording(refuses=True)}, ())
    memory = Memory(4096)
    with pytest.raises(IllegalTransition, match="refused"):
        engine.submit([memory.read(files[0], 0), memory.read(files[1], 1)])
    assert [handle.num_waits for handle in waited] == [1]


def test_registration_and_facts_are_those_of_all(files: list[DirectFile]) -> None:
    """Files go to their own engine, memory to every one; something is registered only when it is everywhere."""
    first = Recording(EngineFacts(True, True, ("one note",)))
    second = Recording(EngineFacts(True, False, ("one note", "another")))
    engine = DeviceEngine({1: first, 2: second}, ("shared",))
    memory = MemoryRange(4096, 8192)
    engine.register(files=files, memory=[memory])
    assert first.registered == [([files[0], files[2]], [memory])]
    assert second.registered == [([files[1]], [memory])]
    assert engine.facts == EngineFacts(True, False, ("shared", "one note", "another"))
    engine.unregister(files=files, memory=[memory])
    assert not engine.facts.registered_files  # nothing is given any more
    assert first.registered == second.registered == []


def test_a_refused_unregister_forgets_nothing(files: list[DirectFile]) -> None:
    """What an engine did not let go of is registered still, and the facts say so; a second try takes it back."""

    class Holding(Recording):
        is_busy = False

        def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
            if self.is_busy:
                raise IllegalTransition("requests are in flight")

    free, busy = Holding(EngineFacts(False, True, ())), Holding()  # the facts of `free` once it has let go of its file
    busy.is_busy = True
    engine = DeviceEngine({1: free, 2: busy}, ())
    engine.register(files=files[:2])
    with pytest.raises(IllegalTransition, match="in flight"):
        engine.unregister(files=files[:2])
    assert engine.facts.registered_files
    busy.is_busy = False
    engine.unregister(files=[files[1]])
    assert not engine.facts.registered_files


def test_every_engine_is_closed_although_one_reports_a_failure() -> None:
    """The failure is raised, once all are closed; an engine that serves two devices is closed once."""
    broken, whole = Recording(fails_to_close=True), Recording()
    engine = DeviceEngine({1: whole, 2: broken, 3: whole}, ())
    with pytest.raises(StorageError, match="lost a write"):
        engine.close()
    assert (broken.num_closed, whole.num_closed) == (1, 1)


@pytest.fixture
def two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two directories that say that they are on different devices, and their files too."""
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()

    def stat(path: Path) -> SimpleNamespace:
        return SimpleNamespace(st_dev=os.stat(path).st_dev + (path == directories[1]))

    monkeypatch.setattr(devices, "os", SimpleNamespace(stat=stat))
    return directories


def test_two_devices_have_two_engines_that_work(two_devices: list[Path], kind: str) -> None:
    """Bytes written through the composed engine come back from both directories, with one engine a device (C27)."""
    opened: list[Engine] = []

    def open_one() -> Engine:
        opened.append(open_kind(kind))
        return opened[-1]

    engine = open_device_engines([*two_devices, two_devices[0]], open_one)
    assert len(opened) == 2
    assert engine.name == kind
    files = [open_direct(directory / "file", create=True) for directory in two_devices]
    files[1].device += 1
    sources, targets = [Memory(1 << 20), Memory(1 << 20)], [Memory(1 << 20), Memory(1 << 20)]
    data = [source.fill() for source in sources]
    AllOf(engine.submit([source.write(file, 0) for source, file in zip(sources, files, strict=True)])).wait()
    AllOf(engine.submit([target.read(file, 0) for target, file in zip(targets, files, strict=True)])).wait()
    assert [target.map[:] for target in targets] == data
    engine.close()
    for one in opened:
        with pytest.raises(IllegalTransition, match="CLOSED"):
            one.submit([sources[0].write(files[0], 0)])
    for file in files:
        file.close()


def _opener(num_good: int) -> tuple[Callable[[], Engine], list[Recording]]:
    opened: list[Recording] = []

    def open_one() -> Engine:
        if len(opened) == num_good:
            raise PlatformError("12 MiB of locked memory are needed, the limit is 8 MiB.", remedy="ulimit -l 12288")
        opened.append(Recording())
        return opened[-1]

    return open_one, opened


def test_a_second_engine_that_cannot_be_had_is_a_note(two_devices: list[Path]) -> None:
    """C27: the first engine serves both devices, and the note says which directory shares, why, and the remedy."""
    open_one, opened = _opener(1)
    engine = open_device_engines(two_devices, open_one)
    [note] = engine.facts.notes
    assert str(two_devices[1]) in note
    assert "limit is 8 MiB" in note
    assert "ulimit -l 12288" in note
    file = open_direct(two_devices[1] / "file", create=True)
    file.device += 1
    engine.submit([Memory(4096).read(file, 0)])
    assert len(opened[0].submitted) == 1
    engine.close()
    assert opened[0].num_closed == 1
    file.close()


def test_without_any_engine_the_error_is_that_of_the_first(two_devices: list[Path]) -> None:
    """An engine that cannot be had at all is an error, as with one directory."""
    with pytest.raises(PlatformError, match="locked memory"):
        open_device_engines(two_devices, _opener(0)[0])


def test_one_device_has_a_plain_engine(tmp_path: Path) -> None:
    """Two directories on one device, or none, cost nothing beside the engine itself."""
    for directories in ([tmp_path, tmp_path], []):
        open_one, opened = _opener(1)
        assert open_device_engines(directories, open_one) is opened[0]
