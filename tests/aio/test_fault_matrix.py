"""The fault matrix: what each engine makes of each fault, and that it serves the next request afterwards.

The faults come from three sides: from below (the engine's own calls to the system), from above (FaultyEngine around the
engine), and from the system itself (devices that are always full or always fail).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from aio_cases import Memory, open_kind
from real_faults import Effect, Fails, Moves, open_above_faults

from infinity.aio.engine import Engine
from infinity.aio.failures import END_OF_FILE, storage_error
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.request import Op, Request
from infinity.errors import StorageError, SwapSpaceError

PAGE = 4096
TRIES = 65  # of one piece without progress: the first and 64 more
PIECE = 4 * PAGE  # the requests below are two pieces, one at a time


@dataclass(frozen=True)
class Case:
    """A request of two pieces and what its calls meet. Without `number` it goes well, bit for bit."""

    name: str
    op: Op
    effects: Mapping[int, Effect]
    number: int | None = None  # errno; 0 for the end of the file
    offset: int = 0  # where the error says that the request stopped
    says: str = ""


def both_ways(name: str, effects: Mapping[int, Effect], *rest: object) -> list[Case]:
    return [Case(f"{op.value}: {name}", op, effects, *rest) for op in Op]  # type: ignore[arg-type]


FOR_EVER = range(TRIES)
NEARLY = {i: Fails(errno.EAGAIN) for i in range(TRIES - 1)}
NEARLY_AGAIN = {i + TRIES: Fails(errno.EAGAIN) for i in range(TRIES - 2)}
CASES = [
    *both_ways("EIO at once", {0: Fails(errno.EIO)}, errno.EIO, 0, "Input/output error"),
    *both_ways("EIO in the second piece", {1: Fails(errno.EIO)}, errno.EIO, PIECE, "Input/output error"),
    *both_ways("EAGAIN twice", {0: Fails(errno.EAGAIN), 1: Fails(errno.EAGAIN)}),
    *both_ways("EAGAIN for ever", {i: Fails(errno.EAGAIN) for i in FOR_EVER}, errno.EAGAIN, 0, "lower aio.queue_depth"),
    *both_ways("EINTR in each piece", {0: Fails(errno.EINTR), 2: Fails(errno.EINTR)}),
    *both_ways("EINTR for ever", {i: Fails(errno.EINTR) for i in FOR_EVER}, errno.EINTR, 0, "Interrupted system call"),
    *both_ways("EAGAIN nearly too often, short, and again", {**NEARLY, TRIES - 1: Moves(512), **NEARLY_AGAIN}),
    *both_ways("short, in blocks", {0: Moves(512), 1: Moves(PAGE), 3: Moves(1024)}),
    *both_ways("short, then EIO", {0: Moves(PAGE + 512), 1: Fails(errno.EIO)}, errno.EIO, PAGE + 512, "Input/output error"),
    *both_ways("short, interrupted, short", {0: Moves(512), 1: Fails(errno.EINTR), 2: Moves(512)}),
    Case("write: ENOSPC", Op.WRITE, {1: Fails(errno.ENOSPC)}, errno.ENOSPC, PIECE, "bytes are free"),
    Case("write: EDQUOT", Op.WRITE, {0: Fails(errno.EDQUOT)}, errno.EDQUOT, 0, "Raise the quota"),
    Case("write: EROFS", Op.WRITE, {0: Fails(errno.EROFS)}, errno.EROFS, 0, "mounted read-only"),
    Case("write: nothing twice", Op.WRITE, {0: Moves(0), 1: Moves(0)}),
    Case("write: nothing for ever", Op.WRITE, {i: Moves(0) for i in FOR_EVER}, errno.EIO, 0, "Input/output error"),
    Case("read: end of file at once", Op.READ, {0: Moves(0)}, 0, 0, "end of file"),
    Case("read: end of file on the way", Op.READ, {0: Moves(PAGE), 1: Moves(0)}, 0, PAGE, "end of file"),
]


def error_of(engine: Engine, request: Request) -> StorageError | None:
    try:
        engine.submit([request])[0].wait()
    except StorageError as error:
        return error
    return None


def serves(engine: Engine, file: DirectFile) -> bool:
    """Return whether the engine moves bytes both ways, in several pieces."""
    source, target = Memory(3 * PIECE), Memory(3 * PIECE)
    data = source.fill()
    written, read = error_of(engine, source.write(file, PIECE)), error_of(engine, target.read(file, PIECE))
    return written is None and read is None and target.map[:] == data


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_faults_from_below(kind: str, file: DirectFile, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: each fault of the engine's own calls ends as the table says: named to the byte, or mended."""
    memory = Memory(2 * PIECE)
    data = memory.fill()
    file.path.write_bytes(data if case.op is Op.READ else b"")
    engine = open_above_faults(kind, case.effects, monkeypatch, queue_depth=1, block_bytes=PIECE)
    memory.map[:] = data if case.op is Op.WRITE else bytes(2 * PIECE)
    error = error_of(engine, memory.read(file, 0) if case.op is Op.READ else memory.write(file, 0))
    if case.number is None:
        assert error is None
        assert memory.map[:] == file.path.read_bytes() == data
    else:
        assert error is not None
        assert error.errno == case.number
        where = f"{case.op.value} of {2 * PIECE - case.offset} bytes at offset {case.offset} of {file.path} failed: "
        assert where in error.message
        assert case.says in str(error)
        assert error.remedy
    monkeypatch.undo()
    assert serves(engine, file)
    engine.close()


FROM_ABOVE = [
    *[(FaultKind.ERROR, number) for number in (errno.EIO, errno.ENOSPC, errno.EAGAIN, errno.EINTR)],
    *[(FaultKind.SHORT, number) for number in (errno.EIO, errno.ENOSPC)],
    (FaultKind.END, 0),
]


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("fault", "number"), FROM_ABOVE)
def test_faults_from_above(kind: str, file: DirectFile, fault: FaultKind, number: int, op: Op) -> None:
    """C11: around every engine FaultyEngine fails what it is told to, after half of it or before, and nothing else."""
    applies = iter([True])
    engine = FaultyEngine(open_kind(kind), [Fault(fault, lambda _: next(applies, False), errno=number)])
    memory, moved = Memory(4 * PAGE), 0 if fault is FaultKind.ERROR else 2 * PAGE
    data = memory.fill()
    file.path.write_bytes(data if op is Op.READ else b"")
    memory.map[:] = data if op is Op.WRITE else bytes(4 * PAGE)
    error = error_of(engine, memory.read(file, 0) if op is Op.READ else memory.write(file, 0))
    assert error is not None
    assert error.errno == number
    assert ("end of file" if fault is FaultKind.END else os.strerror(number)) in error.message
    assert f"{op.value} of {4 * PAGE - moved} bytes at offset {moved} of {file.path}" in error.message
    assert isinstance(error, SwapSpaceError) is (number == errno.ENOSPC)
    assert memory.map[:moved] == file.path.read_bytes()[:moved] == data[:moved]
    assert op is Op.WRITE or memory.map[moved:] == bytes(4 * PAGE - moved)
    assert op is Op.READ or file.path.stat().st_size == moved
    assert serves(engine, file)
    engine.close()


@pytest.mark.parametrize(
    ("path", "op", "number"),
    [("/dev/full", Op.WRITE, errno.ENOSPC), ("/proc/self/mem", Op.READ, errno.EIO), ("/proc/self/mem", Op.WRITE, errno.EIO)],
)
def test_faults_of_the_system(engine: Engine, file: DirectFile, path: str, op: Op, number: int) -> None:
    """C11: a device that is always full, and memory that is not there, fail for real, with the path."""
    if not Path(path).exists():
        pytest.skip(f"no {path} here")
    failing = DirectFile(Path(path), os.open(path, os.O_RDWR), direct=False, in_memory=True, device=0)
    memory = Memory(2 * PAGE)
    error = error_of(engine, memory.read(failing, PAGE) if op is Op.READ else memory.write(failing, PAGE))
    assert error is not None
    assert error.errno == number
    assert f"{op.value} of {2 * PAGE} bytes at offset {PAGE} of {path} failed: {os.strerror(number)}" in error.message
    assert serves(engine, file)
    engine.unregister(files=[failing])
    failing.close()


NUMBERS = [
    errno.EACCES, errno.EAGAIN, errno.EBADF, errno.ECANCELED, errno.EDQUOT, errno.EFAULT, errno.EFBIG, errno.EINTR,
    errno.EINVAL, errno.EIO, errno.EMFILE, errno.ENOENT, errno.ENOSPC, errno.EPERM, errno.EROFS, errno.ESTALE,
    errno.ETIMEDOUT,
]  # fmt: skip


@pytest.mark.parametrize(
    "code", [END_OF_FILE, *[-number for number in NUMBERS]], ids=lambda code: errno.errorcode.get(-code)
)
def test_an_error_says_all(tmp_path: Path, code: int) -> None:
    """C11: operation, path, offset, length, the errno in words and what to do about it: no remedy is the general one."""
    error = storage_error("read", tmp_path / "file", code, offset=8192, length=4096)
    assert f"read of 4096 bytes at offset 8192 of {tmp_path / 'file'} failed: " in error.message
    assert ("end of file" if code == END_OF_FILE else f"{os.strerror(-code)} (errno {-code})") in error.message
    assert error.errno == (0 if code == END_OF_FILE else -code)
    assert len(error.remedy) > 20
    assert error.remedy != storage_error("read", tmp_path / "file", -errno.ENOTTY).remedy


def test_a_request_on_a_file_that_has_moved(kind: str, tmp_path: Path) -> None:
    """A file is where its descriptor is: renamed, replaced by another of its name, or removed, requests reach it alone."""
    engine, memory, back = open_kind(kind, queue_depth=4, block_bytes=PAGE), Memory(8 * PAGE), Memory(8 * PAGE)
    for change in ("renamed", "replaced", "removed"):
        path = tmp_path / change
        file = open_direct(path, create=True)
        path.rename(tmp_path / "elsewhere")
        if change == "replaced":
            path.write_bytes(b"another")
        elif change == "removed":
            (tmp_path / "elsewhere").unlink()
        data = memory.fill()
        assert error_of(engine, memory.write(file, 0)) is None
        assert error_of(engine, back.read(file, 0)) is None
        assert back.map[:] == data
        assert change != "replaced" or path.read_bytes() == b"another"
        engine.unregister(files=[file])
        file.close()
    engine.close()
