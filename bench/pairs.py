"""Two sides measured in turn: the ratio of each pair, its median with a bootstrap interval, and what it says of a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from provenance import markdown_table

from infinity.bench.spread import bootstrap_interval


@dataclass(frozen=True)
class Measurement:
    """One run of one side; `cpu_seconds` is None where it was not measured, `fsync_seconds` where nothing was synced."""

    bytes_per_second: float
    num_bytes: int
    cpu_seconds: float | None = None
    fsync_seconds: float | None = None


@dataclass
class Pairs:
    """What was measured of one job so far. In every other pair the sides change places, so that drift meets both alike."""

    what: str
    target: float  # the least ratio of ours to theirs; 0: nothing is promised
    run_ours: Callable[[], Measurement]
    run_theirs: Callable[[], Measurement]
    ours: list[Measurement] = field(default_factory=list)
    theirs: list[Measurement] = field(default_factory=list)

    def measure(self) -> None:
        """Run one more pair."""
        sides = [(self.theirs, self.run_theirs), (self.ours, self.run_ours)]
        for measurements, run in sides if len(self.ours) % 2 == 0 else reversed(sides):
            measurements.append(run())

    @property
    def ratios(self) -> list[float]:
        return [a.bytes_per_second / b.bytes_per_second for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def control_ratios(self) -> list[float]:
        """The other side against itself: two runs that followed each other directly, the later to the earlier."""
        rates = [measurement.bytes_per_second for measurement in self.theirs]
        return [rates[index + 1] / rates[index] for index in range(1, len(rates) - 1, 2)]

    @property
    def is_decided(self) -> bool:
        """Whether the interval lies on one side of the target."""
        low, high = bootstrap_interval(self.ratios)
        return low >= self.target or high < self.target

    @property
    def verdict(self) -> str:
        if not self.target:
            return "nothing promised"
        met = "met" if median(self.ratios) >= self.target else "missed"
        return met if self.is_decided else f"{met}, within noise"

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "what": self.what,
            "target": self.target,
            "ratio": median(self.ratios),
            "interval": bootstrap_interval(self.ratios),
            "verdict": self.verdict,
            "control": self.control_ratios,
            "cpu_seconds_per_gb": {"ours": cpu_seconds_per_gb(self.ours), "theirs": cpu_seconds_per_gb(self.theirs)},
            "ours": [asdict(measurement) for measurement in self.ours],
            "theirs": [asdict(measurement) for measurement in self.theirs],
        }


def cpu_seconds_per_gb(side: list[Measurement]) -> float | None:
    """Return the CPU time per GB over all runs of a side, for that of a single run is a few ticks of the clock."""
    seconds = [measurement.cpu_seconds for measurement in side if measurement.cpu_seconds is not None]
    return sum(seconds) / (sum(measurement.num_bytes for measurement in side) / 1e9) if seconds else None


def measure_until_decided(jobs: list[Pairs], least_pairs: int, seconds_left: Callable[[], float]) -> None:
    """Measure `least_pairs` of each job, then go on with those that noise still hides, while there is time."""
    for job in jobs:
        for _ in range(least_pairs):
            job.measure()
        print(f"{job.what}: {median(job.ratios):.3f} ({job.verdict})", flush=True)
    while seconds_left() > 0 and (undecided := [job for job in jobs if not job.is_decided]):
        for job in undecided:
            job.measure()


def pairs_table(jobs: list[Pairs], ours: str, theirs: str) -> str:
    """Return the jobs as a Markdown table."""
    rows = []
    for job in jobs:
        low, high = bootstrap_interval(job.ratios)
        control = job.control_ratios
        rows.append([
            job.what,
            *(f"{median(m.bytes_per_second for m in side) / 1e9:.3f}" for side in (job.ours, job.theirs)),
            f"{median(job.ratios):.3f}", f"{low:.3f}-{high:.3f}", str(len(job.ratios)),
            f"{min(control):.3f}-{max(control):.3f}" if control else "", f"{job.target or ''}", job.verdict,
        ])  # fmt: skip
    header = [
        "job",
        f"{ours}, GB/s",
        f"{theirs}, GB/s",
        "ratio",
        "95 %",
        "pairs",
        f"{theirs} against itself",
        "at least",
        "",
    ]
    return markdown_table(header, rows)
