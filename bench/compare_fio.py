"""fio and infinity.aio in turn on one file: bandwidth, 4 KiB operations, CPU time; and the overhead of Python.

fio runs with the fastest of its engines (io_uring with and without registered buffers and files, libaio), which is chosen
for each job first, and with its buffers on huge pages, which makes it up to twice as fast. A run of either side counts from
its first submission to its last completion; what is written is synced after it, apart. CPU time is that of our whole
process, and what fio says of the thread that runs its job.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from claims import Claim, as_json, claims_table
from pairs import Measurement, Pairs, cpu_seconds_per_gb, measure_until_decided, pairs_table
from provenance import ROOT, describe_directory, output_of, write_results

from infinity.aio.engine import Engine, EngineFacts, MemoryRange
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.request import Op, Request
from infinity.aio.select import open_engine
from infinity.bench.fio import LIBAIO, URING, URING_PLAIN, Fio, FioEngine, find_fio
from infinity.bench.nvme_bed import open_targets
from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic, batches_of
from infinity.bench.nvme_measure import Timing, process_cpu_seconds, run_steadily
from infinity.bench.nvme_places import check_places
from infinity.bench.nvme_stream import Target
from infinity.handles import AllOf

WORKERS = ROOT / "bench" / "workers"
MIB = 1 << 20
LARGE_JOBS = tuple(Job(traffic, *shape) for shape in ((MIB, 32), (4 * MIB, 16)) for traffic in Traffic)
SMALL_JOB = Job(Traffic.READ, 4096, 64)
LEAST_LARGE, LEAST_SMALL, MOST_CPU, MOST_OVERHEAD_US = 0.97, 0.85, 1.2, 20.0
FIO_ENGINES = (URING, URING_PLAIN, LIBAIO)
MOST_EXACT = 1e-4  # CPU seconds per GB that can be told from none
NUM_OVERHEAD_ROUNDS, NUM_OVERHEAD_REQUESTS = 21, 1024


def run_fio(fio: Fio, target: Target, job: Job, engine: FioEngine, seconds: float) -> Measurement:
    """Run a job with fio, then sync what it wrote."""
    run = fio.run(job, engine, seconds, with_latency=False)
    if job.traffic is Traffic.READ:
        return Measurement(run.bytes_per_second, run.num_bytes, run.cpu_seconds)
    begin = time.perf_counter()
    target.file.sync()
    return Measurement(run.bytes_per_second, run.num_bytes, run.cpu_seconds, time.perf_counter() - begin)


def run_ours(engine: Engine, target: Target, job: Job, seconds: float) -> Measurement:
    """Run the same job with one of our engines."""
    before = process_cpu_seconds()
    run = run_steadily(engine, target, job, Timing(0.0, seconds, 1, 0.0), threading.Event())
    cpu_seconds = process_cpu_seconds() - before
    return Measurement(run.bytes_per_second, run.num_bytes, cpu_seconds, run.fsync_seconds)


def best_engine(fio: Fio, job: Job, seconds: float) -> FioEngine:
    """Return the engine of fio that is fastest for a job."""
    return max(FIO_ENGINES, key=lambda engine: fio.run(job, engine, seconds, with_latency=False).bytes_per_second)


def overhead_us(engine: Engine, file: DirectFile, target: Target, batch: int) -> tuple[float, float]:
    """Return what submitting and waiting for one request costs: CPU time of this thread, and time, in us.

    The requests are for a block of a hole, so that they take the whole way through the engine and the kernel, and no disk.
    Both are medians over rounds.
    """
    request = Request(Op.READ, file, 0, target.memory.address, SMALL_JOB.block_bytes, target.memory)
    requests, num_batches = [request] * batch, NUM_OVERHEAD_REQUESTS // batch
    cpu_seconds, seconds = [], []
    for _ in range(NUM_OVERHEAD_ROUNDS):
        cpu, begin = time.thread_time(), time.perf_counter()
        for _ in range(num_batches):
            AllOf(engine.submit(requests)).wait()
        cpu_seconds.append(time.thread_time() - cpu)
        seconds.append(time.perf_counter() - begin)
    count = num_batches * batch
    return median(cpu_seconds) / count * 1e6, median(seconds) / count * 1e6


def overhead_in_c_us(file: DirectFile) -> tuple[float, float] | None:
    """Return the same for one request of a C program on the same engine; None where there is no C compiler.

    What the two have in common, waking the ring's thread and sleeping until it answers, is the system's; the difference is
    Python's.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    sources = [WORKERS / "aio_overhead.c", *sorted((ROOT / "csrc" / "aio").glob("*.c"))]
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "aio_overhead"
        flags = ["-O2", "-pthread", f"-I{ROOT / 'csrc' / 'aio'}", "-o", str(program)]
        subprocess.run([compiler, *flags, *map(str, sources), "-luring"], check=True)
        arguments = [str(file.path), str(NUM_OVERHEAD_REQUESTS), str(NUM_OVERHEAD_ROUNDS)]
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
    rounds = [line.split() for line in done.stdout.splitlines()]
    return median(float(cpu) for cpu, _ in rounds) / 1e3, median(float(whole) for _, whole in rounds) / 1e3


@contextmanager
def open_hole(directory: Path) -> Iterator[DirectFile]:
    """Yield a file of one block that no disk holds."""
    with tempfile.NamedTemporaryFile(prefix=".infinity-hole-", dir=directory) as named:
        os.truncate(named.name, SMALL_JOB.block_bytes)
        file = open_direct(named.name, create=False)
        try:
            yield file
        finally:
            file.close()


def pair_jobs(
    fio: Fio, target: Target, seconds: float, resources: ExitStack
) -> tuple[list[Pairs], dict[str, str], list[EngineFacts]]:
    """Return the jobs with their two sides, the engine of fio for each, and what ours registered for each."""
    jobs, chosen, facts = [], {}, []
    for job in (*LARGE_JOBS, SMALL_JOB):
        theirs = best_engine(fio, job, seconds)
        chosen[str(job)] = " ".join((theirs.name, *theirs.options))
        engine = open_engine("auto", queue_depth=job.queue_depth, block_bytes=job.block_bytes)
        resources.callback(engine.close)
        engine.register(files=[target.file], memory=[MemoryRange(target.memory.address, batches_of(job).num_bytes)])
        facts.append(engine.facts)
        jobs.append(
            Pairs(
                what=str(job),
                target=LEAST_SMALL if job is SMALL_JOB else LEAST_LARGE,
                run_ours=lambda job=job, engine=engine: run_ours(engine, target, job, seconds),
                run_theirs=lambda job=job, theirs=theirs: run_fio(fio, target, job, theirs, seconds),
            )
        )
    return jobs, chosen, facts


def claims_of(jobs: list[Pairs], overhead: dict[str, float]) -> list[Claim]:
    """Return what is promised beyond the rates."""
    cpu = [
        Claim(f"CPU s per GB, {job.what}, to fio's", ours / max(theirs, MOST_EXACT), MOST_CPU, "ratio")
        for job in jobs
        if job.target == LEAST_LARGE
        and (ours := cpu_seconds_per_gb(job.ours)) is not None
        and (theirs := cpu_seconds_per_gb(job.theirs)) is not None
    ]
    what = "Python's overhead of one request (CPU of the caller, beyond a C program's)"
    return [*cpu, Claim(what, overhead["one_cpu_us"] - overhead["c_cpu_us"], MOST_OVERHEAD_US, "us")]


def fsync_words(jobs: list[Pairs]) -> str:
    """Return how long the fsync after writing took on both sides, which is in none of the rates."""
    medians = [
        f"{job.what}: {' and '.join(f'{median(seconds) * 1e3:.1f}' for seconds in sides)}"
        for job in jobs
        if all(sides := [[m.fsync_seconds for m in side if m.fsync_seconds is not None] for side in (job.ours, job.theirs)])
    ]
    return f"fsync after each run, ms, infinity's and fio's: {'; '.join(medians)}."


def main() -> int:
    """Measure, write the results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--gigabytes", type=int, default=4, help="GiB of the file")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each run")
    parser.add_argument("--pairs", type=int, default=9, help="of each job, at least")
    parser.add_argument("--minutes", type=float, default=5.0, help="when no further pairs begin")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    every = (*LARGE_JOBS, SMALL_JOB)
    settings = NvmeSettings((arguments.nvme,), size_bytes=arguments.gigabytes << 30)
    with ExitStack() as resources:
        places = check_places(settings, every, resources)
        (target,), _ = open_targets(places, every, write_seconds=None, tell=print, resources=resources)
        fio = Fio(find_fio(), target.file.path, target.file_bytes)
        jobs, chosen, facts = pair_jobs(fio, target, arguments.seconds, resources)
        measure_until_decided(jobs, arguments.pairs, lambda: end - time.monotonic())
        hole = resources.enter_context(open_hole(arguments.nvme))
        engine = open_engine("auto")
        resources.callback(engine.close)
        engine.register(files=[hole], memory=[MemoryRange(target.memory.address, SMALL_JOB.block_bytes)])
        cpu_one, time_one = overhead_us(engine, hole, target, 1)
        cpu_many, time_many = overhead_us(engine, hole, target, 64)
        cpu_c, time_c = overhead_in_c_us(hole) or (0.0, 0.0)
        name = engine.name
    overhead = {
        "one_cpu_us": cpu_one, "one_us": time_one, "c_cpu_us": cpu_c, "c_us": time_c, "of_64_cpu_us": cpu_many,
        "of_64_us": time_many,
    }  # fmt: skip
    claims = claims_of(jobs, overhead)
    results: dict[str, Any] = {
        "disk": describe_directory(arguments.nvme), "fio": output_of("fio", "--version"), "engine": name,
        "direct": places.direct[name], "registered_files": all(one.registered_files for one in facts),
        "registered_buffers": all(one.registered_buffers for one in facts), "fio_engines": chosen,
        "jobs": [job.as_json() for job in jobs], "overhead": overhead, "claims": as_json(claims),
    }  # fmt: skip
    small = jobs[-1]
    said = [
        pairs_table(jobs, "infinity", "fio"),
        f"4 KiB reads: {median(m.bytes_per_second for m in small.ours) / 4096:.0f} operations a second, fio "
        f"{median(m.bytes_per_second for m in small.theirs) / 4096:.0f}.",
        fsync_words(jobs),
        claims_table(claims),
        f"One request at a time takes {time_one:.1f} us from submission to the end of waiting, {cpu_one:.1f} of them CPU "
        f"time of the caller; a C program on the same engine {time_c:.1f} and {cpu_c:.1f} us. In batches of 64 one costs "
        f"{time_many:.1f} us, {cpu_many:.1f} of them CPU time.",
    ]
    write_results("compare_fio", results, "infinity.aio and fio on the same file", "\n\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
