"""The same job for fio: its command and its JSON; https://fio.readthedocs.io.

[Note: fio's buffers] fio takes its buffers from malloc. On small pages a block of 1 MiB reaches the disk in many segments,
which costs it up to half of its speed, so glibc is asked for huge pages (2.35 and newer know the tunable): infinity's
buffers are on huge pages, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.bench.nvme_jobs import Job, Traffic
from infinity.errors import PlatformError, StorageError

_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_DIRECTIONS = {Traffic.READ: "read", Traffic.WRITE: "write", Traffic.MIXED: "rw"}


@dataclass(frozen=True, slots=True)
class FioEngine:
    """One of fio's engines with the options that make it fastest."""

    name: str
    options: tuple[str, ...] = ()
    registers: bool = False  # buffers and files


URING = FioEngine("io_uring", ("--fixedbufs=1", "--registerfiles=1", "--nonvectored=1"), registers=True)
URING_PLAIN = FioEngine("io_uring")
LIBAIO = FioEngine("libaio")


@dataclass(frozen=True, slots=True)
class FioRun:
    """What one run of fio gave; latencies are microseconds and 0 where they were not measured."""

    bytes_per_second: float
    num_bytes: int
    latency_p50_us: float
    latency_p99_us: float
    latency_max_us: float
    cpu_seconds: float  # of the thread that runs the job, user and kernel, without starting and ending

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.num_bytes / 1e9)


class Fio:
    """fio on one file that exists: it makes and removes none."""

    def __init__(self, program: str, file: Path, file_bytes: int) -> None:
        self._program = program
        self._file = file
        self._file_bytes = file_bytes

    def run(self, job: Job, engine: FioEngine, seconds: float, *, with_latency: bool = True) -> FioRun:
        """Run a job for a time. Raises StorageError with fio's last line when it fails."""
        limits = ["--time_based=1", f"--runtime={round(seconds * 1000)}ms"]
        limits += [] if with_latency else ["--gtod_reduce=1"]
        command = [self._program, *self._options(job), f"--ioengine={engine.name}", *engine.options, *limits]
        done = _run_process(command)
        if done.returncode:
            last = done.stdout.strip().rpartition("\n")[2]
            raise StorageError(f"fio failed with {engine.name} ({last}).", remedy=f"Try it by hand: {' '.join(command)}")
        return parse_report(done.stdout, job)

    def _options(self, job: Job) -> list[str]:
        direction = _DIRECTIONS[job.traffic]
        return [
            "--name=job", "--output-format=json", "--direct=1", "--randrepeat=0", "--norandommap=1",
            "--allow_file_create=0", "--unified_rw_reporting=1", "--thread=1", "--scramble_buffers=0",
            f"--filename={str(self._file).replace(':', chr(92) + ':')}", f"--size={self._file_bytes}",
            f"--rw={'rand' + direction if job.is_random else direction}", f"--bs={job.block_bytes}",
            f"--iodepth={job.queue_depth}",
        ]  # fmt: skip


def find_fio() -> str:
    """Return the program's path. Raises PlatformError where it is not installed."""
    program = shutil.which("fio")
    if program is None:
        raise PlatformError(
            "--against fio: the program fio is not installed.",
            remedy="Install the package fio of your system, or leave --against out.",
        )
    return program


def parse_report(text: str, job: Job) -> FioRun:
    """Return what fio's JSON says of a job. Raises StorageError when it reports an error or is no report."""
    try:
        # Warnings may stand before and after the report, on the same stream.
        report: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["jobs"][0]
        moved = report["mixed"]
        percentiles = moved["clat_ns"].get("percentile", {})
        run = FioRun(
            bytes_per_second=float(moved["bw_bytes"]),
            num_bytes=int(moved["io_bytes"]),
            latency_p50_us=percentiles.get("50.000000", 0) / 1e3,
            latency_p99_us=percentiles.get("99.000000", 0) / 1e3,
            latency_max_us=moved["clat_ns"]["max"] / 1e3,
            cpu_seconds=(report["usr_cpu"] + report["sys_cpu"]) / 100 * report["job_runtime"] / 1e3,
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StorageError(f"fio gave no report that can be read for {job}.", remedy="Use fio 3.1 or newer.") from error
    if report["error"] or not run.num_bytes:
        raise StorageError(f"fio reports error {report['error']} for {job}.", errno=int(report["error"]))
    return run


def _run_process(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run fio with its buffers on huge pages, see [Note: fio's buffers]; it is killed when this is interrupted."""
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), _HUGE_PAGES)))
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env={**os.environ, "GLIBC_TUNABLES": tunables},
    )  # fmt: skip
