"""Registered files and memory: the same bytes by a cheaper way, said where it cannot be had, and never another's file."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aio_cases import Memory, open_kind, pipe_file

from infinity.aio.engine import UNREGISTERED, Engine, MemoryRange
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request, address_of
from infinity.errors import IllegalTransition, StorageError
from infinity.handles import AllOf

PAGE = 4096
HERE = Path(__file__).parent


def range_of(memory: Memory) -> MemoryRange:
    return MemoryRange(memory.address, memory.num_bytes)


@pytest.fixture
def ring() -> Iterator[Engine]:
    pytest.importorskip("infinity._aio", reason="built without liburing")
    engine = open_kind("uring", block_bytes=2 * PAGE)
    yield engine
    engine.close()


def test_registered_or_not_the_bytes_are_the_same(engine: Engine, file: DirectFile) -> None:
    """Requests on registered files and memory, beside them and across their edges move the right bytes."""
    memory, back = Memory(64 * PAGE), Memory(64 * PAGE)
    inner = MemoryRange(memory.address + 3 * PAGE, 20 * PAGE)  # its edges lie within pieces
    for turn in range(3):
        data = memory.fill()
        if turn == 1:
            engine.register(files=[file], memory=[inner, range_of(back)])
        if turn == 2:
            engine.unregister(files=[file], memory=[inner])
        AllOf(engine.submit([memory.write(file, i * PAGE, start=i * PAGE, length=4 * PAGE) for i in range(0, 64, 4)])).wait()
        AllOf(engine.submit([back.read(file, 0)])).wait()
        assert back.map[:] == data
    engine.unregister(memory=[range_of(back)])


def test_facts_say_what_holds_now(kind: str, file: DirectFile) -> None:
    """`facts` follow what is registered; engines with nothing to register say so and take the same calls."""
    engine = open_kind(kind)
    memory, other = Memory(PAGE), Memory(PAGE)
    assert engine.facts == UNREGISTERED
    engine.unregister(files=[file], memory=[range_of(memory)])  # never registered: ignored
    engine.register(files=[file], memory=[range_of(memory), range_of(other)])
    engine.register(files=[file], memory=[range_of(memory)])  # again: the same
    facts = engine.facts
    registers = kind == "uring"
    assert (facts.registered_files, facts.registered_buffers, facts.notes) == (registers, registers, ())
    engine.unregister(files=[file])
    assert (engine.facts.registered_files, engine.facts.registered_buffers) == (False, registers)
    engine.unregister(memory=[range_of(memory), range_of(other)])
    assert engine.facts == UNREGISTERED
    engine.close()


def test_memory_that_cannot_be_registered(ring: Engine, file: DirectFile) -> None:
    """Memory that is not mapped stays unregistered with one note, registered ranges stay, and requests go on."""
    memory = Memory(4 * PAGE)
    hole = MemoryRange(PAGE, PAGE)
    ring.register(files=[file], memory=[range_of(memory), hole])
    facts = ring.facts
    assert (facts.registered_files, facts.registered_buffers) == (True, False)
    [note] = facts.notes
    assert "could not be registered" in note
    assert "Bad address" in note
    memory.fill()
    AllOf(ring.submit([memory.write(file, 0)])).wait()
    ring.unregister(memory=[hole])
    assert ring.facts.registered_buffers
    assert ring.facts.notes == ()


@pytest.mark.parametrize(("limit", "fits"), [(64 << 10, 0), (8 << 20, 4 << 20)])
def test_too_little_locked_memory(tmp_path: Path, limit: int, fits: int) -> None:
    """C25: beyond the memlock limit buffers stay unregistered; the note names needed bytes, limit and both remedies."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    script = (
        "import os, resource, sys\n"
        "from pathlib import Path\n"
        "from aio_cases import Memory\n"
        "from infinity.aio.engine import MemoryRange\n"
        "from infinity.aio.files import open_direct\n"
        "from infinity.aio.uring import open_uring\n"
        "limit, fits = int(sys.argv[2]), int(sys.argv[3])\n"
        "file, memory = open_direct(sys.argv[1], create=True), Memory(64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))\n"
        "if os.geteuid() == 0:\n"
        "    os.setgid(65534)\n"
        "    os.setuid(65534)\n"  # root's memory has no limit
        "engine = open_uring(queue_depth=8, block_bytes=1 << 20)\n"
        "engine.register(files=[file])\n"
        "if fits:\n"
        "    small = MemoryRange(memory.address, fits)\n"
        "    engine.register(memory=[small])\n"
        "    print(engine.facts.registered_buffers)\n"
        "    engine.unregister(memory=[small])\n"
        "engine.register(memory=[MemoryRange(memory.address, memory.num_bytes)])\n"
        "print(engine.facts.registered_files, engine.facts.registered_buffers)\n"
        "data = memory.fill()\n"
        "engine.submit([memory.write(file, 0)])[0].wait()\n"
        "memory.map[:] = bytes(64 << 20)\n"
        "engine.submit([memory.read(file, 0)])[0].wait()\n"
        "print(memory.map[:] == data)\n"
        "print(*engine.facts.notes, sep='\\n')\n"
        "engine.close()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file"), str(limit), str(fits)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if "io_uring cannot be used" in result.stderr:
        pytest.skip("without privileges there is no ring here")
    *answers, note = result.stdout.splitlines()
    assert answers == ["True"] * bool(fits) + ["True False", "True"], result.stderr
    assert "64.00 MiB of locked memory are needed" in note
    assert f"the limit is {'64.00 KiB' if limit < 1 << 20 else '8.00 MiB'}" in note
    assert "ulimit -l 65536" in note
    assert "--ulimit memlock=67108864" in note


def test_a_closed_file_is_never_another(ring: Engine, open_file: Callable[..., DirectFile]) -> None:
    """A file that was closed while registered is EBADF, and one that got its number is written to, not the old one."""
    old, memory = open_file(direct=False, name="old"), Memory(PAGE)
    data = memory.fill()
    ring.register(files=[old])
    number = old.fd
    old.close()
    new = open_file(direct=False, name="new")
    assert new.fd == number
    [closed, opened] = ring.submit([memory.write(old, 0), memory.write(new, 0)])
    with pytest.raises(StorageError, match="old"):
        closed.wait()
    opened.wait()
    assert old.path.read_bytes() == b""
    assert new.path.read_bytes() == data
    ring.unregister(files=[old])
    ring.submit([memory.write(new, PAGE)])[0].wait()
    assert new.path.read_bytes() == 2 * data


def test_a_file_is_not_taken_from_under_its_requests(ring: Engine) -> None:
    """Unregistering a file with a request in flight is refused, names the file, and hurts nothing."""
    pipe, writing = pipe_file()
    memory = Memory(1)
    ring.register(files=[pipe])
    [handle] = ring.submit([memory.read(pipe, 0)])
    with pytest.raises(IllegalTransition, match="a-pipe is taken from it while requests"):
        ring.unregister(files=[pipe])
    os.write(writing, b"x")
    handle.wait()
    assert memory.map[:] == b"x"
    ring.unregister(files=[pipe])
    pipe.close()
    os.close(writing)


def test_after_the_close(file: DirectFile) -> None:
    """A closed ring registers nothing, and has nothing to be taken back from it."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    engine, memory = open_kind("uring"), Memory(PAGE)
    engine.register(files=[file], memory=[range_of(memory)])
    engine.close()
    with pytest.raises(IllegalTransition, match="CLOSED"):
        engine.register(files=[file, pipe_file()[0]])
    engine.unregister(files=[file], memory=[range_of(memory)])


def test_a_closed_ring_lets_go_of_its_files_at_once() -> None:
    """The other end of a registered pipe sees its end; so a removed file's space is free, and a disk unmounts."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    for _ in range(10):
        engine = open_kind("uring")
        reading, writing = os.pipe2(os.O_NONBLOCK)
        pipe = DirectFile(Path("a-pipe"), writing, direct=False, in_memory=True, device=0)
        engine.register(files=[pipe])
        pipe.close()
        with pytest.raises(BlockingIOError):  # the ring has it
            os.read(reading, 1)
        engine.close()
        assert os.read(reading, 1) == b""
        os.close(reading)


def test_more_files_than_the_table_holds(ring: Engine, tmp_path: Path) -> None:
    """Files beyond the table are plain, with one note, and every file gets its own bytes; places are used again."""
    flags = os.O_RDWR | os.O_CREAT
    files = [DirectFile(tmp_path / str(i), os.open(tmp_path / str(i), flags), direct=False, in_memory=True, device=0)
             for i in range(70)]  # fmt: skip
    ring.register(files=files)
    assert not ring.facts.registered_files
    assert "6 file(s) could not be registered" in ring.facts.notes[0]
    for turn in range(2):
        memory = Memory(70)
        data = memory.fill()
        AllOf(ring.submit([memory.write(file, 0, start=i, length=1) for i, file in enumerate(files)])).wait()
        assert b"".join(file.path.read_bytes() for file in files) == data
        if turn == 0:
            ring.unregister(files=files[:40])
            ring.register(files=[*files[50:], *files[:6]])
            assert ring.facts.registered_files
    ring.unregister(files=files)
    ring.register(files=files[:64])
    assert ring.facts.registered_files
    ring.unregister(files=files)
    for file in files:
        file.close()


@pytest.mark.slow
def test_a_range_beyond_a_gigabyte(ring: Engine, open_file: Callable[..., DirectFile]) -> None:
    """The kernel takes at most 1 GiB in one piece: a larger range is cut, and requests across the cut are right."""
    file, num_bytes = open_file(direct=True), (1 << 30) + (4 << 20)
    mapping = mmap.mmap(-1, num_bytes + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = address_of(mapping)
    given = MemoryRange(address, num_bytes)
    ring.register(files=[file], memory=[given])
    assert ring.facts.registered_buffers
    start = (1 << 30) - PAGE
    data = os.urandom(4 * PAGE)
    mapping[start : start + 4 * PAGE] = data
    AllOf(ring.submit([Request(Op.WRITE, file, 0, address + start, 4 * PAGE, mapping)])).wait()
    mapping[start : start + 4 * PAGE] = bytes(4 * PAGE)
    AllOf(ring.submit([Request(Op.READ, file, 0, address + start, 4 * PAGE, mapping)])).wait()
    assert mapping[start : start + 4 * PAGE] == data
    ring.unregister(memory=[given])
