"""What `bench nvme` reports, as values and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from infinity.aio.engine import EngineFacts
from infinity.bench.fio import FioEngine, FioRun
from infinity.bench.nvme_jobs import Job, Traffic
from infinity.bench.nvme_measure import Measured
from infinity.bench.nvme_places import Places
from infinity.bench.spread import histogram, percentile, spread_of
from infinity.byte_sizes import format_bytes

# Faster than any single link to an NVMe disk: PCIe 5.0 with four lanes.
_LINK_BYTES_PER_SECOND = 16e9
_SLOWED_DOWN = 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Rates are medians over repetitions and exclude fsync; GB is 10**9 bytes."""

    op: str
    engine: str
    block_bytes: int
    queue_depth: int
    bytes_per_second: float
    bytes_per_second_min: float
    bytes_per_second_max: float
    iops: float
    latency_p50_us: float
    latency_p99_us: float
    latency_max_us: float
    cpu_seconds_per_gb: float
    registered_buffers: bool
    registered_files: bool


@dataclass(frozen=True, slots=True)
class Detail:
    """What stands behind a row."""

    op: str
    engine: str
    block_bytes: int
    queue_depth: int
    access: str  # "sequential" | "random"
    repetitions_bytes_per_second: tuple[float, ...]
    median_interval: tuple[float, float]  # 95 %, bootstrap
    fsync_seconds: float | None
    latency_histogram_us: dict[int, int]  # upper bound: number of blocks


@dataclass(frozen=True, slots=True)
class Result:
    """A row and what stands behind it."""

    row: Row
    detail: Detail


@dataclass(frozen=True, slots=True)
class LongRun:
    """Writing without a pause: bytes per second in intervals of equal length, in order."""

    engine: str
    block_bytes: int
    queue_depth: int
    interval_seconds: float
    rates: tuple[float, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured. `results` are those of all directories together; `alone` those of each, by its path."""

    places: Places
    file_bytes: int
    results: tuple[Result, ...]
    against: tuple[Row, ...]
    alone: dict[str, tuple[Result, ...]]
    long_run: LongRun | None
    written_bytes: int
    notes: tuple[str, ...]


def result_of(job: Job, engine: str, facts: EngineFacts, measured: Measured) -> Result:
    """Return the row of a job and its details."""
    spread = spread_of(measured.rates)
    row = Row(
        op=job.traffic.value,
        engine=engine,
        block_bytes=job.block_bytes,
        queue_depth=job.queue_depth,
        bytes_per_second=spread.median,
        bytes_per_second_min=spread.least,
        bytes_per_second_max=spread.greatest,
        iops=spread.median / job.block_bytes,
        latency_p50_us=percentile(measured.latencies_us, 0.5),
        latency_p99_us=percentile(measured.latencies_us, 0.99),
        latency_max_us=measured.latencies_us[-1],
        cpu_seconds_per_gb=measured.cpu_seconds_per_gb,
        registered_buffers=facts.registered_buffers,
        registered_files=facts.registered_files,
    )
    detail = Detail(
        op=row.op,
        engine=engine,
        block_bytes=job.block_bytes,
        queue_depth=job.queue_depth,
        access="random" if job.is_random else "sequential",
        repetitions_bytes_per_second=measured.rates,
        median_interval=(spread.low, spread.high),
        fsync_seconds=measured.fsync_seconds,
        latency_histogram_us=histogram(measured.latencies_us),
    )
    return Result(row, detail)


def fio_row(job: Job, engine: FioEngine, runs: Sequence[FioRun]) -> Row:
    """Return the row of several runs of fio: medians, and the longest latency of all."""
    rates = [run.bytes_per_second for run in runs]
    return Row(
        op=job.traffic.value,
        engine=f"fio:{engine.name}",
        block_bytes=job.block_bytes,
        queue_depth=job.queue_depth,
        bytes_per_second=median(rates),
        bytes_per_second_min=min(rates),
        bytes_per_second_max=max(rates),
        iops=median(rates) / job.block_bytes,
        latency_p50_us=median(run.latency_p50_us for run in runs),
        latency_p99_us=median(run.latency_p99_us for run in runs),
        latency_max_us=max(run.latency_max_us for run in runs),
        cpu_seconds_per_gb=median(run.cpu_seconds_per_gb for run in runs),
        registered_buffers=engine.registers,
        registered_files=engine.registers,
    )


def cache_notes(rows: Sequence[Row], resident_share: float, num_directories: int) -> list[str]:
    """Return a sentence for each sign that bytes came from memory and not from the disk."""
    notes = []
    if resident_share > 0.01:
        notes.append(
            f"The reads are no measure of the disk: {resident_share:.0%} of the file was in the page cache, for it is "
            "read without O_DIRECT. Give a directory on a local ext4 or XFS file system and another engine than buffered."
        )
    fastest = max((row.bytes_per_second for row in rows), default=0.0)
    if fastest > _LINK_BYTES_PER_SECOND * num_directories:
        notes.append(
            f"{fastest / 1e9:.1f} GB/s is more than an NVMe disk's link carries (16 GB/s each): this came from a cache."
        )
    return notes


def slowdown_note(run: LongRun) -> str:
    """Return what the rate over time says about the disk's write cache."""
    share = max(1, len(run.rates) // 5)
    first, last = median(run.rates[:share]), median(run.rates[-share:])
    written = format_bytes(run.num_bytes)
    if last < _SLOWED_DOWN * first:
        return (
            f"Writing slows down: {first / 1e9:.2f} GB/s at first, {last / 1e9:.2f} after {written}, as when a disk's write "
            "cache is full. Expect the second of them in training."
        )
    return (
        f"Writing stayed at {last / 1e9:.2f} GB/s over {written}. A disk slows down when its write cache is full, which may "
        "take tens of GB: --long-run 300 writes for five minutes."
    )


def as_json(report: Report, provenance: dict[str, object]) -> dict[str, object]:
    """Return the report as plain values."""
    places = report.places
    return {
        "provenance": provenance,
        "directories": [
            {"path": str(facts.path), "file_system": facts.file_system, "is_memory": facts.is_memory}
            for facts in places.directories
        ],
        "direct": dict(places.direct),
        "file_bytes": report.file_bytes,
        "written_bytes": report.written_bytes,
        "results": [asdict(result.row) for result in report.results],
        "against": [asdict(row) for row in report.against],
        "details": [asdict(result.detail) for result in report.results],
        "alone": {
            path: {
                "results": [asdict(result.row) for result in results],
                "details": [asdict(result.detail) for result in results],
            }
            for path, results in report.alone.items()
        },
        "long_run": asdict(report.long_run) if report.long_run else None,
        "notes": list(report.notes),
    }


def best_rows(rows: Sequence[Row]) -> dict[Traffic, Row]:
    """Return the fastest row of each kind of traffic."""
    ordered = sorted(rows, key=lambda row: row.bytes_per_second)
    return {Traffic(row.op): row for row in ordered}
