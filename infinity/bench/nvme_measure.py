"""Measures one job: bytes per second in consecutive windows of one steady run, CPU time, fsync, latency of each block.

[Note: latency] A block's latency is what its handle says: from its issue until the engine saw its end, so that the time in
the engine behind a full queue does not count, as in fio's clat. There are always more blocks at the engine than its queue
holds, so exactly `queue_depth` are on their way; those with which the queue runs empty at the end are not counted. It is
measured in a run of its own, because there every block is a request, and because looking at each costs CPU time that the
other run must not be charged with.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from infinity.aio.engine import Engine
from infinity.bench.nvme_jobs import Job, Traffic, batches_of, single_blocks_of
from infinity.bench.nvme_stream import Stream, Target

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a job runs: untimed, in each of `num_windows` timed windows, and for the latencies."""

    warm_up_seconds: float
    window_seconds: float
    num_windows: int
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """A steady run: the rate in each window (bytes per second), and its whole from the first submission to the last end."""

    rates: tuple[float, ...]
    num_bytes: int
    seconds: float
    fsync_seconds: float | None  # None when nothing was written

    @property
    def bytes_per_second(self) -> float:
        """The rate of the whole run, its beginning and end included."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Latencies:
    """Those of single blocks, in microseconds, and the bytes that were moved to know them."""

    microseconds: tuple[float, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A job on one or several targets at once: rates are sums over the targets, latencies (microseconds) those of all."""

    rates: tuple[float, ...]
    cpu_seconds_per_gb: float
    fsync_seconds: float | None  # the longest of the targets
    latencies_us: tuple[float, ...]  # ascending
    num_bytes: int  # moved for the rates and for the latencies


def measure(pairs: Sequence[tuple[Engine, Target]], job: Job, timing: Timing) -> Measured:
    """Run a job on every target at once, each with its own engine, and return what they give together.

    Raises StorageError when a request fails; then there is no result.
    """
    cpu_seconds = process_cpu_seconds()
    runs = side_by_side(pairs, lambda engine, target, stop: run_steadily(engine, target, job, timing, stop))
    cpu_seconds = process_cpu_seconds() - cpu_seconds
    found = side_by_side(pairs, lambda engine, target, stop: latencies(engine, target, job, timing.latency_seconds, stop))
    num_bytes = sum(run.num_bytes for run in runs)
    syncs = [run.fsync_seconds for run in runs if run.fsync_seconds is not None]
    return Measured(
        rates=tuple(sum(rates) for rates in zip(*(run.rates for run in runs), strict=True)),
        cpu_seconds_per_gb=cpu_seconds / (num_bytes / 1e9),
        fsync_seconds=max(syncs, default=None),
        latencies_us=tuple(sorted(value for one in found for value in one.microseconds)),
        num_bytes=num_bytes + sum(one.num_bytes for one in found),
    )


def run_steadily(engine: Engine, target: Target, job: Job, timing: Timing, stop: threading.Event) -> Run:
    """Run a job without a pause through warm-up and windows, then fsync. `stop` ends it early, and its result is void."""
    stream = Stream(engine, job, target, batches_of(job))
    begin = time.perf_counter()
    stream.start()
    _, num_bytes = _run_window(stream, timing.warm_up_seconds, stop)
    rates = []
    for _ in range(timing.num_windows):
        seconds, moved = _run_window(stream, timing.window_seconds, stop)
        rates.append(moved / seconds)
        num_bytes += moved
    num_bytes += stream.drain()
    end = time.perf_counter()
    if job.traffic is Traffic.READ:
        return Run(tuple(rates), num_bytes, end - begin, None)
    target.file.sync()
    return Run(tuple(rates), num_bytes, end - begin, time.perf_counter() - end)


def _run_window(stream: Stream, seconds: float, stop: threading.Event) -> tuple[float, int]:
    """Run until a batch ends after `seconds`, and return the time until then and the bytes moved in it."""
    begin = time.perf_counter()
    moved = stream.advance()
    while (elapsed := time.perf_counter() - begin) < seconds and not stop.is_set():
        moved += stream.advance()
    return elapsed, moved


def latencies(engine: Engine, target: Target, job: Job, seconds: float, stop: threading.Event) -> Latencies:
    """Measure single blocks for some time, `queue_depth` of them at least. See [Note: latency]."""
    stream = Stream(engine, job, target, single_blocks_of(job))
    found: list[float] = []
    num_bytes = 0
    end = time.perf_counter() + seconds
    stream.start()
    while (num_bytes < job.queue_depth * job.block_bytes or time.perf_counter() < end) and not stop.is_set():
        num_bytes += stream.advance()
        taken = [handle.latency_nanoseconds for handle in stream.finished]
        found += [nanoseconds / 1e3 for nanoseconds in taken if nanoseconds is not None]
    return Latencies(tuple(found), num_bytes + stream.drain())


def side_by_side(pairs: Sequence[tuple[Engine, Target]], work: Callable[[Engine, Target, threading.Event], T]) -> list[T]:
    """Do some work on every target at once; when one fails, or this thread is interrupted, the others end early."""
    stop = threading.Event()
    if len(pairs) == 1:
        return [work(*pairs[0], stop)]
    with ThreadPoolExecutor(len(pairs)) as threads:
        futures = [threads.submit(work, engine, target, stop) for engine, target in pairs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # of no effect on those that are done
        return [future.result() for future in futures]


def process_cpu_seconds() -> float:
    """Return the CPU time of all threads of this process, in user and kernel mode, until now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
