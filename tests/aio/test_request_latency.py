"""A handle knows how long its request took: from its issue to its end, in every engine by the same rules."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest
from aio_cases import Memory, open_kind, pipe_file

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.files import DirectFile
from infinity.aio.request import RequestState
from infinity.errors import StorageError

PAGE = 4096
DELAY_NANOSECONDS = 50_000_000


@pytest.mark.usefixtures("pipe_reads")
def test_it_is_all_the_time_that_the_request_took(engine: Engine) -> None:
    """A read of a pipe takes until something is written to it, and no longer than from before submit to after wait."""
    pipe, writing = pipe_file()
    memory = Memory(PAGE)
    begin = time.monotonic_ns()
    [handle] = engine.submit([memory.read(pipe, 0)])
    while handle.state is RequestState.QUEUED:
        time.sleep(0.001)
    issued = time.monotonic_ns()
    assert handle.latency_nanoseconds is None
    time.sleep(DELAY_NANOSECONDS / 1e9)
    ready = time.monotonic_ns()
    os.write(writing, bytes(PAGE))
    handle.wait()
    end = time.monotonic_ns()
    latency = handle.latency_nanoseconds
    assert ready - issued <= latency <= end - begin
    assert handle.latency_nanoseconds == latency
    os.close(writing)
    pipe.close()


@pytest.mark.usefixtures("pipe_reads")
def test_waiting_behind_a_full_queue_is_not_in_it(kind: str, open_file: Callable[..., DirectFile]) -> None:
    """At depth 1 the latencies of requests submitted together add up to no more than the time of all."""
    engine, file = open_kind(kind, queue_depth=1), open_file(direct=False)
    pipe, writing = pipe_file()
    memory, source = Memory(PAGE), Memory(PAGE)
    begin = time.monotonic_ns()
    handles = engine.submit([memory.read(pipe, 0), *(source.write(file, number * PAGE) for number in range(8))])
    threading.Timer(DELAY_NANOSECONDS / 1e9, os.write, [writing, bytes(PAGE)]).start()
    for handle in handles:
        handle.wait()
    elapsed = time.monotonic_ns() - begin
    latencies = [handle.latency_nanoseconds for handle in handles]
    assert all(latency > 0 for latency in latencies)
    assert sum(latencies) <= elapsed
    engine.close()
    os.close(writing)
    pipe.close()


def test_a_request_of_many_pieces_has_one(kind: str, file: DirectFile) -> None:
    """Several blocks, one latency: no longer than from before submit to after wait; there after the engine's close, too."""
    engine, memory = open_kind(kind, queue_depth=2, block_bytes=PAGE), Memory(16 * PAGE)
    begin = time.monotonic_ns()
    [handle] = engine.submit([memory.write(file, 0)])
    handle.wait()
    elapsed = time.monotonic_ns() - begin
    engine.close()
    assert 0 < handle.latency_nanoseconds <= elapsed


def test_a_request_that_was_never_issued_has_none(engine: Engine, file: DirectFile) -> None:
    """Nothing to move, or a place before the file: both are over, and neither took any time."""
    memory = Memory(PAGE)
    empty, illegal = engine.submit([memory.write(file, 0, length=0), memory.write(file, -PAGE)])
    empty.wait()
    with pytest.raises(StorageError):
        illegal.wait()
    assert empty.latency_nanoseconds is illegal.latency_nanoseconds is None


def test_a_failed_request_has_one(kind: str, file: DirectFile) -> None:
    """What failed at the kernel took its time there as well."""
    engine, memory = open_kind(kind, faults={0: -errno.EIO}), Memory(PAGE)
    [handle] = engine.submit([memory.write(file, 0)])
    with pytest.raises(StorageError):
        handle.wait()
    assert handle.latency_nanoseconds > 0
    engine.close()


def test_a_delay_is_in_it(engine: Engine, file: DirectFile) -> None:
    """A request that a fault delays is not over before, and says that it took so long; another one is not changed."""
    delay = Fault(FaultKind.DELAY, lambda request: request.offset == 0, delay_seconds=DELAY_NANOSECONDS / 1e9)
    memory = Memory(PAGE)
    slow, plain = FaultyEngine(engine, [delay]).submit([memory.write(file, 0), memory.write(file, PAGE)])
    assert slow.done() or slow.latency_nanoseconds is None
    slow.wait()
    plain.wait()
    assert slow.latency_nanoseconds >= DELAY_NANOSECONDS
    assert plain.latency_nanoseconds > 0
