"""What only the buffered engine has: several open files on one file, an event loop, threads that come with the work."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aio_cases import Memory
from test_direct_files import resident_pages

from infinity.aio.buffered import open_buffered
from infinity.aio.files import DirectFile, open_direct
from infinity.errors import PlatformError
from infinity.handles import AllOf

PAGE = 4096


def open_with(monkeypatch: pytest.MonkeyPatch, opener: Callable[..., io.FileIO]) -> None:
    """Let aiofiles open files so; `opener` takes file, mode and closefd."""
    monkeypatch.setattr("aiofiles.threadpool.sync_open", lambda file, mode, closefd, **_: opener(file, mode, closefd))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_pieces_of_one_file_move_at_the_same_time(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pieces of one file are in four system calls at once; none of them could end before all have begun."""
    together = threading.Barrier(4)

    class Patient(io.FileIO):
        def write(self, buffer: Any) -> int:
            together.wait(timeout=20)
            return super().write(buffer)

    open_with(monkeypatch, Patient)
    engine, memory = open_buffered(queue_depth=4, block_bytes=PAGE), Memory(8 * PAGE)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    assert file.path.read_bytes() == data
    engine.close()


@pytest.mark.parametrize("num_allowed", [0, 1, 2])
def test_too_few_descriptors(file: DirectFile, monkeypatch: pytest.MonkeyPatch, num_allowed: int) -> None:
    """Where no more files can be opened the pieces share those that are open, and in the end the file's own descriptor."""
    opened: list[object] = []
    refused: list[object] = []

    def some(path: object, mode: str, closefd: bool) -> io.FileIO:
        if isinstance(path, Path):
            if len(opened) == num_allowed:
                refused.append(path)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            opened.append(path)
        return io.FileIO(path, mode, closefd=closefd)  # type: ignore[arg-type]

    open_with(monkeypatch, some)
    engine, memory, back = open_buffered(queue_depth=8, block_bytes=PAGE), Memory(64 * PAGE), Memory(64 * PAGE)
    data = memory.fill()
    AllOf(engine.submit([memory.write(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(64)])).wait()
    AllOf(engine.submit([back.read(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(64)])).wait()
    assert back.map[:] == data
    assert (len(opened), len(refused)) == (num_allowed, 1)  # it is not tried again for each piece
    engine.close()


def test_what_it_opened_is_closed_when_the_file_is(tmp_path: Path) -> None:
    """C28: `unregister` closes what was opened of a file, so that a removed one frees its space, which on tmpfs is RAM.

    Without it that happens when the next file comes, or at the close.
    """
    gc.collect()  # what earlier tests left
    engine, memory = open_buffered(queue_depth=4, block_bytes=PAGE), Memory(16 * PAGE)
    before = num_descriptors()
    files = [open_direct(tmp_path / name, create=True) for name in ("first", "second", "third")]
    engine.submit([memory.write(files[0], 0)])[0].wait()
    assert num_descriptors() > before + 3
    engine.unregister(files=files)
    assert num_descriptors() == before + 3
    engine.submit([memory.write(files[1], 0)])[0].wait()
    second = num_descriptors() - 3 - before
    files[1].close()
    engine.submit([memory.write(files[2], 0)])[0].wait()
    engine.unregister(files=[files[2]])
    assert second > 0
    assert num_descriptors() == before + 2
    files[0].close()
    files[2].close()
    engine.close()
    engine.unregister(files=files)
    assert num_descriptors() < before  # the loop's are gone too


def test_no_page_cache_stays_behind(open_file: Callable[..., DirectFile]) -> None:
    """C41: although the file is direct and the engine is not, nothing stays in the page cache after a sync or a read."""
    file, memory = open_file(direct=True), Memory(4 << 20)
    engine = open_buffered(queue_depth=4, block_bytes=1 << 18)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    file.sync()
    assert resident_pages(file.path) == 0
    engine.submit([memory.read(file, 0)])[0].wait()
    assert resident_pages(file.path) == 0
    assert memory.map[:] == data
    engine.close()


def start_only(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> list[threading.Thread]:
    """Refuse every thread after the first so many; return those that were started."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return started


@pytest.mark.parametrize("num_threads", [0, 1])
def test_an_engine_without_its_threads(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """C27: where the loop's thread or the first one for calls is refused the engine is refused, and what did start ends."""
    gc.collect()
    before, descriptors = threading.active_count(), num_descriptors()
    started = start_only(monkeypatch, num_threads)
    with pytest.raises(PlatformError, match=r"can't start new thread.*ulimit -u"):
        open_buffered(queue_depth=8, block_bytes=PAGE)
    assert len(started) == num_threads
    for thread in started:
        thread.join(timeout=20)
    assert threading.active_count() <= before
    assert num_descriptors() <= descriptors


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_that_cannot_be_had_later(file: DirectFile, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """C27: where the system gives no more threads in the middle, the pieces share those that there are, and all arrive."""
    started = start_only(monkeypatch, num_threads)
    engine, memory = open_buffered(queue_depth=8, block_bytes=PAGE), Memory(64 * PAGE)
    data = memory.fill()
    AllOf(engine.submit([memory.write(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(64)])).wait()
    assert len(started) == num_threads
    engine.close()
    assert file.path.read_bytes() == data


def test_threads_come_with_the_work_and_no_more_than_that(file: DirectFile) -> None:
    """C27: a hundred idle engines of the greatest depth have two threads each; at work there are 32 and the loop's."""
    gc.collect()
    before = threading.active_count()
    engines = [open_buffered(queue_depth=4096, block_bytes=PAGE) for _ in range(100)]
    assert threading.active_count() == before + 200
    for engine in engines[1:]:
        engine.close()
    memory = Memory(256 * PAGE)
    AllOf(engines[0].submit([memory.write(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(256)])).wait()
    assert before + 2 <= threading.active_count() <= before + 33
    one_by_one = open_buffered(queue_depth=4096, block_bytes=PAGE)
    engines[0].close()
    for turn in range(20):
        one_by_one.submit([memory.write(file, turn * PAGE, start=0, length=PAGE)])[0].wait()
    assert threading.active_count() == before + 2  # one call at a time needs one thread
    one_by_one.close()
    assert threading.active_count() == before


def test_no_descriptors_for_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """C27: where the loop cannot be had the engine is refused, and its threads end."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = threading.active_count()
    monkeypatch.setattr("asyncio.new_event_loop", refuse)
    with pytest.raises(PlatformError, match=r"Too many open files.*ulimit -n"):
        open_buffered(queue_depth=8, block_bytes=PAGE)
    assert threading.active_count() <= before
