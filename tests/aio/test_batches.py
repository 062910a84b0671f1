"""Requests that were submitted together are waited for together: one call into C for all of them where that is possible."""

from __future__ import annotations

import errno
import os
import time
from types import SimpleNamespace

import pytest
from aio_cases import Memory, open_kind, pipe_file

from infinity.aio import submissions
from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.errors import StorageError
from infinity.handles import AllOf

PAGE = 4096


@pytest.fixture
def num_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of aio_wait: the list grows by one for each."""
    lib, calls = submissions.lib, []

    def aio_wait(*arguments: object) -> int:
        calls.append(1)
        return int(lib.aio_wait(*arguments))

    if lib is not None:
        names = ("aio_submit", "aio_next_failure", "AIO_ALL_OVER", "AIO_OVER")
        monkeypatch.setattr(
            submissions, "lib", SimpleNamespace(aio_wait=aio_wait, **{name: getattr(lib, name) for name in names})
        )
    return calls


def test_one_wait_for_a_whole_batch(num_waits: list[int], file: DirectFile) -> None:
    """A batch that is over costs one call into C, however many handles it has; waiting again costs none."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    engine, memory = open_kind("uring"), Memory(100 * PAGE)
    handles = engine.submit([memory.write(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(100)])
    while not all(handle.done() for handle in handles):
        time.sleep(0.001)
    for _ in range(2):
        AllOf(handles).wait()
        assert len(num_waits) == 1
    engine.close()


def test_a_handle_does_not_wait_for_its_neighbours(engine: Engine, file: DirectFile, pipe_reads: None) -> None:
    """A request of a batch is over by itself, while another one of the same batch is not."""
    pipe, writing = pipe_file()
    byte, memory = Memory(1), Memory(PAGE)
    slow, quick = engine.submit([byte.read(pipe, 0), memory.write(file, 0)])
    quick.wait()
    assert quick.done()
    assert not slow.done()
    os.write(writing, b"x")
    slow.wait()
    pipe.close()
    os.close(writing)


def test_failures_of_a_batch_stay_with_their_requests(kind: str, file: DirectFile) -> None:
    """Each handle raises its own request's error, as often as it is asked; those that nobody asked are counted at close."""
    engine = open_kind(kind, queue_depth=1, faults={1: -errno.EIO, 3: -errno.ENOSPC, 4: -errno.EIO})
    memory = Memory(PAGE)
    handles = engine.submit([memory.write(file, i * PAGE) for i in range(6)])
    with pytest.raises(StorageError, match=f"offset {PAGE} of") as first:
        AllOf(handles[:3]).wait()
    with pytest.raises(StorageError) as again:
        handles[1].wait()
    assert again.value is first.value
    for index in (0, 2, 5):
        handles[index].wait()
    with pytest.raises(StorageError, match=r"2 request\(s\) failed and nobody waited"):
        engine.close()
