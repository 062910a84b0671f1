"""The engine that goes wrong on request does exactly what its faults say, and nothing else."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import pytest
from aio_cases import Memory

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request
from infinity.errors import StorageError, SwapSpaceError

PAGE = 4096
Applies = Callable[[Request], bool]


def at(offset: int, op: Op) -> Applies:
    return lambda request: request.offset == offset and request.op is op


def test_other_requests_pass(engine: Engine, file: DirectFile) -> None:
    """A request that no fault applies to goes through unchanged, beside one that fails."""
    faulty = FaultyEngine(engine, [Fault(FaultKind.ERROR, at(0, Op.WRITE), errno=errno.ENOSPC)])
    memory, back = Memory(PAGE), Memory(PAGE)
    data = memory.fill()
    failing, passing = faulty.submit([memory.write(file, 0), memory.write(file, PAGE)])
    with pytest.raises(SwapSpaceError, match="write of 4096 bytes at offset 0"):
        failing.wait()
    passing.wait()
    faulty.submit([back.read(file, PAGE)])[0].wait()
    assert back.map[:] == data
    assert faulty.name == engine.name


def test_an_error_moves_nothing(engine: Engine, file: DirectFile) -> None:
    """A failed read leaves the buffer as it was."""
    faulty = FaultyEngine(engine, [Fault(FaultKind.ERROR, at(0, Op.READ))])
    memory = Memory(PAGE)
    memory.fill()
    faulty.submit([memory.write(file, 0)])[0].wait()
    data = memory.fill()
    [handle] = faulty.submit([memory.read(file, 0)])
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            handle.wait()
        assert caught.value.errno == errno.EIO
    assert memory.map[:] == data


def test_a_torn_write(engine: Engine, file: DirectFile) -> None:
    """SHORT writes whole pages of the first half, then fails and names the rest."""
    faulty = FaultyEngine(engine, [Fault(FaultKind.SHORT, at(0, Op.WRITE))])
    memory, back = Memory(5 * PAGE), Memory(2 * PAGE)
    data = memory.fill()
    [handle] = faulty.submit([memory.write(file, 0)])
    with pytest.raises(StorageError, match=f"write of {3 * PAGE} bytes at offset {2 * PAGE}"):
        handle.wait()
    faulty.submit([back.read(file, 0)])[0].wait()
    assert back.map[:] == data[: 2 * PAGE]
    assert file.path.stat().st_size == 2 * PAGE


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_flipped_bit(engine: Engine, file: DirectFile, op: Op) -> None:
    """CORRUPT flips one bit on the way; the caller's source of a write stays as it is."""
    faulty = FaultyEngine(engine, [Fault(FaultKind.CORRUPT, at(0, op))])
    memory, back = Memory(2 * PAGE), Memory(2 * PAGE)
    data = memory.fill()
    faulty.submit([memory.write(file, 0)])[0].wait()
    assert memory.map[:] == data
    [handle] = faulty.submit([back.read(file, 0)])
    handle.wait()
    handle.wait()
    differing = [i for i in range(2 * PAGE) if back.map[i] != data[i]]
    assert differing == [PAGE]
    assert back.map[PAGE] == data[PAGE] ^ 1
    assert (file.path.read_bytes() == data) is (op is Op.READ)


def test_a_delay(engine: Engine, file: DirectFile) -> None:
    """DELAY keeps a request from being done before its time, and loses nothing."""
    faulty = FaultyEngine(engine, [Fault(FaultKind.DELAY, at(0, Op.WRITE), delay_seconds=0.2)])
    memory = Memory(PAGE)
    data = memory.fill()
    start = time.monotonic()
    [handle] = faulty.submit([memory.write(file, 0)])
    assert not handle.done()
    handle.wait()
    assert time.monotonic() - start >= 0.2
    assert handle.done()
    assert file.path.read_bytes() == data
