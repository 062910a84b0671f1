"""How engines end: what is submitted is finished, what is queued fails, nothing is leaked and no failure is swallowed."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aio_cases import Memory, num_engine_threads, open_kind, pipe_file, run_python

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.errors import IllegalTransition, StorageError
from infinity.handles import Handle

PAGE = 4096


def refuses(engine: Engine) -> bool:
    try:
        engine.submit([])
    except IllegalTransition:
        return True
    return False


def ending(handle: Handle[None]) -> int | None:
    """Return the errno that a request ended with; 0 for success."""
    try:
        handle.wait()
    except StorageError as error:
        return error.errno
    return 0


def test_closing_with_requests_in_flight(kind: str, file: DirectFile, pipe_reads: None) -> None:
    """What the kernel has is finished, what is queued fails with ECANCELED, and both are known when close returns."""
    engine = open_kind(kind, queue_depth=1)
    pipe, writing = pipe_file()
    byte, memory = Memory(1), Memory(PAGE)
    [submitted] = engine.submit([byte.read(pipe, 0)])
    while submitted.state.name != "SUBMITTED":
        time.sleep(0.001)
    queued = engine.submit([memory.read(file, i * PAGE) for i in range(10)])
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not refuses(engine):
        time.sleep(0.001)
    os.write(writing, b"x")
    closer.join(timeout=20)
    assert not closer.is_alive()
    submitted.wait()
    assert byte.map[:] == b"x"
    for handle in queued:
        assert handle.done()
        with pytest.raises(StorageError, match="closed first") as caught:
            handle.wait()
        assert caught.value.errno == errno.ECANCELED
    pipe.close()
    os.close(writing)


def test_closing_amid_writes(kind: str, file: DirectFile) -> None:
    """However a close falls among writes, each of them is whole or did not begin."""
    memory, length = Memory(16 * PAGE), 16 * PAGE
    data = memory.fill()
    for turn in range(10):
        os.truncate(file.fd, 0)
        os.truncate(file.fd, 200 * length)
        engine = open_kind(kind, queue_depth=4, block_bytes=PAGE)
        handles = engine.submit([memory.write(file, i * length) for i in range(200)])
        handles[turn * 3].wait()
        with contextlib.suppress(StorageError):  # the cancelled writes, of which each is looked at below
            engine.close()
        endings = [ending(handle) for handle in handles]
        assert set(endings) <= {0, errno.ECANCELED}
        content = file.path.read_bytes()
        for i, number in enumerate(endings):
            assert content[i * length : (i + 1) * length] == (bytes(length) if number else data)


def test_close_is_idempotent(engine: Engine) -> None:
    """Closing twice is fine, and a closed engine takes no requests."""
    engine.close()
    engine.close()
    with pytest.raises(IllegalTransition, match="CLOSED"):
        engine.submit([])


def test_an_unwaited_failure_is_reported(kind: str, file: DirectFile) -> None:
    """C3: a failed request that nobody waited for is raised by close, which says how many there are."""
    engine = open_kind(kind, queue_depth=1, faults={0: -errno.EIO, 2: -errno.EIO})
    memory = Memory(PAGE)
    engine.submit([memory.write(file, i * PAGE) for i in range(4)])
    [last] = engine.submit([memory.write(file, 0)])
    last.wait()
    gc.collect()
    with pytest.raises(StorageError, match=r"2 request\(s\) failed and nobody waited") as caught:
        engine.close()
    assert caught.value.errno == errno.EIO


def test_a_failure_is_reported_once(kind: str, file: DirectFile) -> None:
    """A failure that was raised by wait is not raised again by close, but again by wait."""
    engine = open_kind(kind, faults={0: -errno.EIO})
    [handle] = engine.submit([Memory(PAGE).write(file, 0)])
    with pytest.raises(StorageError) as first:
        handle.wait()
    engine.close()
    with pytest.raises(StorageError) as second:
        handle.wait()
    assert first.value is second.value


def test_a_hundred_engines(kind: str, file: DirectFile) -> None:
    """C27: engines that are opened, used and closed leave neither descriptors nor threads nor memory behind."""
    memory = Memory(PAGE)

    def use(count: int) -> None:
        for _ in range(count):
            engine = open_kind(kind)
            engine.submit([memory.write(file, 0)])[0].wait()
            engine.close()
            del engine
        gc.collect()

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    gc.collect()  # what earlier tests left
    before = left()
    use(10)  # what the first ones load stays in memory
    resident = resident_bytes()
    use(100)
    assert resident_bytes() - resident < 4 << 20
    for _ in range(500):  # the kernel lists a thread for a moment after it was joined
        gone = all(after <= count for after, count in zip(left(), before, strict=True))
        if gone:
            break
        time.sleep(0.01)
    assert gone, (before, left())


def test_an_interpreter_that_ends_with_an_open_engine(kind: str, tmp_path: Path) -> None:
    """A program that never closes its engine ends all the same, with its exit code; writes that it cut short are said."""
    script = (
        "import sys\n"
        "from aio_cases import Memory, open_kind\n"
        "from infinity.aio.files import open_direct\n"
        "engine, memory = open_kind(sys.argv[1]), Memory(1 << 20)\n"
        "file = open_direct(sys.argv[2], create=True)\n"
        "engine.submit([memory.write(file, 0)])[0].wait()\n"
        "engine.submit([memory.write(file, i << 20) for i in range(8)])\n"
        "sys.exit(7)\n"
    )
    result = run_python("-c", script, kind, str(tmp_path / "file"), timeout_seconds=60)
    assert (result.returncode, result.stdout) == (7, "")
    assert result.stderr == "" or "closed first" in result.stderr


def test_an_engine_that_is_closed_when_the_interpreter_ends(kind: str, tmp_path: Path) -> None:
    """Files are unregistered and the engine is closed after threads may no longer be asked for anything: nothing hangs."""
    script = (
        "import atexit, os, sys\n"
        "from aio_cases import Memory, open_kind\n"
        "from infinity.aio.files import open_direct\n"
        "engine, memory = open_kind(sys.argv[1]), Memory(1 << 20)\n"
        "file = open_direct(sys.argv[2], create=True)\n"
        "engine.submit([memory.write(file, 0)])[0].wait()\n"
        "def end():\n"
        "    engine.unregister(files=[file])\n"
        "    links = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]\n"
        "    print(sum(os.path.lexists(link) and os.readlink(link) == sys.argv[2] for link in links))\n"
        "    file.close()\n"
        "    engine.close()\n"
        "atexit.register(end)\n"
        "sys.exit(7)\n"
    )
    result = run_python("-c", script, kind, str(tmp_path / "file"), timeout_seconds=60)
    assert (result.returncode, result.stdout, result.stderr) == (7, "1\n", "")  # its own descriptor alone


def test_a_dropped_ring_is_closed(file: DirectFile) -> None:
    """An io_uring engine that is dropped without a close finishes its writes and ends its thread."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    threads, memory = num_engine_threads(), Memory(64 * PAGE)
    data = memory.fill()
    engine = open_kind("uring", queue_depth=1, block_bytes=PAGE)
    [handle] = engine.submit([memory.write(file, 0)])
    while handle.state.name == "QUEUED":
        time.sleep(0.001)
    del engine, handle
    gc.collect()
    assert num_engine_threads() == threads
    assert file.path.read_bytes() == data


def test_a_ring_in_a_cycle_is_closed_before_it_is_freed(file: DirectFile) -> None:
    """Dropped as part of a reference cycle, in whatever order the collector finds its parts, the engine ends its thread."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    threads, memory = num_engine_threads(), Memory(4 * PAGE)
    data = memory.fill()
    for _ in range(20):
        cycle: list[object] = [open_kind("uring", queue_depth=1, block_bytes=PAGE)]
        engine = cycle[0]
        handles = engine.submit([memory.write(file, 0)])  # type: ignore[attr-defined]
        cycle += [cycle, handles, engine._native]  # type: ignore[attr-defined]
        engine.cycle = cycle  # type: ignore[attr-defined]
        del cycle, engine, handles
        gc.collect()
    assert num_engine_threads() == threads
    assert file.path.read_bytes()[: len(data)] == data


def test_signals_reach_the_program_during_a_wait(engine: Engine, pipe_reads: None) -> None:
    """A signal's handler runs, and may raise, while a request takes long; the request is not hurt."""
    pipe, writing = pipe_file()
    memory = Memory(1)
    [handle] = engine.submit([memory.read(pipe, 0)])

    def interrupt(_number: int, _frame: object) -> None:
        raise TimeoutError("from the handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="from the handler"):
            handle.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.write(writing, b"x")
    handle.wait()
    assert memory.map[:] == b"x"
    pipe.close()
    os.close(writing)


def test_a_forked_child_leaves_the_engine_alone(kind: str, tmp_path: Path) -> None:
    """A child that a fork made can exit, its copy of the engine dropped, and the parent's engine works on."""
    script = (
        "import os, sys\n"
        "from aio_cases import Memory, open_kind\n"
        "from infinity.aio.files import open_direct\n"
        "engine, memory = open_kind(sys.argv[1]), Memory(4096)\n"
        "file = open_direct(sys.argv[2], create=True)\n"
        "engine.submit([memory.write(file, 0)])[0].wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    del engine\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "engine.submit([memory.write(file, 4096)])[0].wait()\n"
        "engine.close()\n"
    )
    result = run_python("-W", "ignore", "-c", script, kind, str(tmp_path / "file"), timeout_seconds=60)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "7", "")


def test_a_wait_releases_the_interpreter(engine: Engine, pipe_reads: None) -> None:
    """Other threads run while one waits for a request."""
    pipe, writing = pipe_file()
    [handle] = engine.submit([Memory(1).read(pipe, 0)])
    helper = threading.Timer(0.05, os.write, (writing, b"x"))  # runs only if the wait lets it
    helper.start()
    handle.wait()
    helper.join()
    pipe.close()
    os.close(writing)


def test_submit_does_not_wait(engine: Engine, open_file: Callable[..., DirectFile], pipe_reads: None) -> None:
    """C8: requests beyond the queue depth are taken while nothing moves, and are served when it does."""
    pipe, writing = pipe_file()
    memory = Memory(64)
    handles = engine.submit([memory.read(pipe, 0, start=i, length=1) for i in range(64)])
    assert not any(handle.done() for handle in handles)
    os.write(writing, bytes(range(64)))
    for handle in handles:
        handle.wait()
    assert sorted(memory.map[:]) == list(range(64))
    pipe.close()
    os.close(writing)
