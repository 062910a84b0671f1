"""Error, short, done: every case of a completion, with results replaced inside the engine's own loop."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from aio_cases import Memory, open_kind

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.errors import StorageError, SwapSpaceError

PAGE = 4096
RETRIES = 64  # of one piece without progress, in both engines


@pytest.fixture
def faulty(kind: str) -> Callable[..., Engine]:
    """Open an engine with one piece of two pages in flight, so that completions have known numbers."""
    return lambda faults, **sizes: open_kind(kind, **{"queue_depth": 1, "block_bytes": 2 * PAGE, **sizes}, faults=faults)


def failure(engine: Engine, request: object) -> StorageError:
    with pytest.raises(StorageError) as caught:
        engine.submit([request])[0].wait()
    return caught.value


def test_an_error_fails_its_request_only(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C11: EIO fails the request with operation, path, offset, length and errno; those queued behind it are served."""
    engine, memory, back = faulty({1: -errno.EIO}), Memory(6 * PAGE), Memory(6 * PAGE)
    data = memory.fill()
    failing, *behind = engine.submit([memory.write(file, 8 * PAGE), memory.write(file, 0), memory.write(file, 2 * PAGE)])
    with pytest.raises(StorageError) as caught:
        failing.wait()
    assert caught.value.errno == errno.EIO
    assert f"write of {4 * PAGE} bytes at offset {10 * PAGE} of {file.path}" in str(caught.value)
    assert caught.value.remedy
    for handle in behind:
        handle.wait()
    assert os.fstat(file.fd).st_size == 12 * PAGE  # the third piece was never issued
    engine.submit([back.read(file, 2 * PAGE)])[0].wait()
    assert back.map[:] == data
    engine.close()


def test_no_space_says_how_much_is_free(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C3: ENOSPC is an error of the write itself, with the free bytes of the directory."""
    engine, memory = faulty({0: -errno.ENOSPC}), Memory(PAGE)
    error = failure(engine, memory.write(file, 0))
    assert isinstance(error, SwapSpaceError)
    assert error.errno == errno.ENOSPC
    assert "bytes are free" in str(error)
    engine.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_passing_errors_are_tried_again(faulty: Callable[..., Engine], file: DirectFile, number: int) -> None:
    """C11: EAGAIN and EINTR are tried again, for reads and writes, and the bits arrive."""
    engine, memory, back = faulty({0: -number, 1: -number, 4: -number}), Memory(4 * PAGE), Memory(4 * PAGE)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    engine.submit([back.read(file, 0)])[0].wait()
    assert back.map[:] == data
    engine.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_passing_errors_that_do_not_pass(faulty: Callable[..., Engine], file: DirectFile, number: int) -> None:
    """C11: trying again is bounded: the error comes through after the last try, and not one try earlier."""
    memory = Memory(PAGE)
    patient = faulty({i: -number for i in range(RETRIES)})
    patient.submit([memory.write(file, 0)])[0].wait()
    patient.close()
    engine = faulty({i: -number for i in range(RETRIES + 1)})
    assert failure(engine, memory.write(file, 0)).errno == number
    engine.close()


def test_a_short_completion_submits_the_rest(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C11: after a short completion the rest is submitted from where it stopped, and the whole arrives."""
    engine, memory, back = faulty({0: PAGE, 2: 512, 3: 1024}), Memory(2 * PAGE), Memory(2 * PAGE)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    engine.submit([back.read(file, 0)])[0].wait()
    assert back.map[:] == data
    engine.close()


def test_the_rest_starts_where_it_stopped(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C11: an error in the rest of a short read names the offset and length of that rest."""
    engine, memory = faulty({1: PAGE, 2: 1536, 3: -errno.EIO}), Memory(2 * PAGE)
    engine.submit([memory.write(file, 0)])[0].wait()
    error = failure(engine, memory.read(file, 0))
    assert f"read of {PAGE - 1536} bytes at offset {PAGE + 1536} of" in str(error)
    engine.close()


def test_direct_progress_counts_in_blocks(faulty: Callable[..., Engine], open_file: Callable[..., DirectFile]) -> None:
    """C11: under O_DIRECT a count that is no whole number of blocks is rounded down, so that the rest stays aligned."""
    file = open_file(direct=True)
    engine, memory, back = faulty({0: 700, 1: -errno.EIO, 3: 700}), Memory(2 * PAGE), Memory(2 * PAGE)
    error = failure(engine, memory.write(file, 0))
    assert f"write of {2 * PAGE - 512} bytes at offset 512 of" in str(error)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    engine.submit([back.read(file, 0)])[0].wait()
    assert back.map[:] == data
    engine.close()


def test_nothing_read_is_the_end_of_the_file(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C11: a read that returns 0 fails as end of file at once, at the place where it stopped."""
    engine, memory = faulty({1: PAGE, 2: 0}), Memory(2 * PAGE)
    engine.submit([memory.write(file, 0)])[0].wait()
    error = failure(engine, memory.read(file, 0))
    assert f"at offset {PAGE} of" in str(error)
    assert "end of file" in str(error)
    engine.close()


def test_nothing_written_is_tried_again(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """C11: a write that returns 0 is tried again, but not for ever: then it is EIO."""
    engine, memory, back = faulty({0: 0, 1: 0}), Memory(2 * PAGE), Memory(2 * PAGE)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    engine.submit([back.read(file, 0)])[0].wait()
    assert back.map[:] == data
    engine.close()
    engine = faulty({i: 0 for i in range(RETRIES + 1)})
    assert failure(engine, memory.write(file, 0)).errno == errno.EIO
    engine.close()


def test_a_failure_among_many_pieces(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """With many pieces in flight a failure ends its request once, whatever its other pieces do, and neighbours go on."""
    engine = faulty({5: -errno.EIO, 6: 512, 7: 1024, 8: -errno.EAGAIN}, queue_depth=8)
    memory = Memory(64 * PAGE)
    first = engine.submit([memory.write(file, 0)])[0]
    others = engine.submit([memory.write(file, (64 + i) * PAGE, length=PAGE) for i in range(20)])
    with pytest.raises(StorageError):
        first.wait()
    for handle in others:
        handle.wait()
    engine.close()


def test_reads_go_first_but_writes_are_not_starved(faulty: Callable[..., Engine], file: DirectFile) -> None:
    """With one piece at a time, eight reads pass before the write that was submitted ahead of them, and the ninth waits."""
    memory = Memory(2 * PAGE)
    filler = faulty({})
    filler.submit([memory.write(file, 0)])[0].wait()
    filler.close()
    requests = [memory.write(file, 0, length=PAGE), *[memory.read(file, 0, length=PAGE) for _ in range(20)]]
    for completion, expected in [(0, 1), (7, 8), (8, 0), (9, 9)]:
        engine = faulty({completion: -errno.EIO})
        handles = engine.submit(requests)
        failed = []
        for number, handle in enumerate(handles):
            try:
                handle.wait()
            except StorageError:
                failed.append(number)
        assert failed == [expected]
        engine.close()
