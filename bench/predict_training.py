"""Does training take the time that the benchmarks predict? The job of compare_deepspeed.py with all its state on NVMe.

The prediction is the bound of a step under exact clipping, max(C, N) of forward and of backward. Bytes are those of the
plan. N follows from the rates of `bench nvme` (1 MiB blocks, depth 32): as many bytes as are read and written are moved at
the mixed rate, the rest alone. C is what the cores compute: the job's own passes timed without disk and optimizer, Adam by
`bench adam`, checksums by the speed of CRC32C from memory on one core, shared out among all. While forward runs, optimizer
state and gradients are read, state and weights written; while backward runs, gradients are written; weights are read in
both. Nothing is taken from the run that is predicted. The disk's benchmark runs before and after it, for a shared disk
drifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from checksums import SETTING, kernel_rates
from claims import Claim, as_json, claims_table
from compare_deepspeed import WARM_UP_STEPS, WORKERS, run_worker
from provenance import ROOT, describe_directory, markdown_table, write_results

from infinity.bench.adam import AdamSettings, run_adam_benchmark
from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic
from infinity.bench.nvme_places import check_places
from infinity.bench.nvme_results import Row
from infinity.bench.nvme_run import run
from infinity.optim.kernel import kernel_names

JOBS = tuple(Job(traffic, 1 << 20, 32) for traffic in Traffic)
ADAM_PATH, ADAM_PARAMETERS = "bf16_split", 50_000_000
MOST_DIFFERENCE = 0.2


class Silent:
    """Takes note of nothing."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def row(self, row: Row) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Volumes:
    """Bytes that one phase of a step reads from NVMe and writes there."""

    read_bytes: float
    write_bytes: float


@dataclass(frozen=True)
class Phase:
    """What a phase of a step is predicted to take."""

    volumes: Volumes
    disk_seconds: float
    pass_seconds: float  # of the model's own computation
    adam_seconds: float
    checksum_seconds: float

    @property
    def compute_seconds(self) -> float:
        return self.pass_seconds + self.adam_seconds + self.checksum_seconds

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.disk_seconds)


def measured_rates(nvme: Path, seconds: float) -> dict[str, float]:
    """Return the median rates of the benchmark by kind of traffic, in bytes per second."""
    settings = NvmeSettings((nvme,), seconds=seconds, long_run_seconds=0.0)
    with ExitStack() as resources:
        places = check_places(settings, JOBS, resources)
        report = run(settings, JOBS, places, None, Silent())
    return {result.row.op: result.row.bytes_per_second for result in report.results}


def disk_seconds(rates: dict[str, float], volumes: Volumes) -> float:
    """Return the time that these volumes take: as many bytes as are read and written at the mixed rate, the rest alone."""
    both = min(volumes.read_bytes, volumes.write_bytes)
    alone = (volumes.read_bytes - both) / rates["read"] + (volumes.write_bytes - both) / rates["write"]
    return 2 * both / rates["mixed"] + alone


def volumes_of_phases(traffic: list[dict[str, Any]]) -> tuple[Volumes, Volumes]:
    """Return what forward and backward move, from the lines of a plan."""
    read = {line["what"]: line["read_bytes"] for line in traffic}
    written = {line["what"]: line["write_bytes"] for line in traffic}
    weights, gradients = read.get("weights", 0) / 2, written.get("gradients", 0)
    forward_writes = sum(written.values()) - gradients
    return Volumes(sum(read.values()) - weights, forward_writes), Volumes(weights, gradients)


def run_python(worker: str, *options: str) -> dict[str, Any]:
    """Return what a worker reports."""
    return run_worker([sys.executable, str(WORKERS / worker), *options], {**os.environ, "PYTHONPATH": str(ROOT)})


def adam_parameters_per_second() -> float:
    """Return the median rate of the kernel and the threads that training uses."""
    report = run_adam_benchmark(AdamSettings(ADAM_PARAMETERS, kernel_names()[0], num_rounds=5))
    [rate] = [
        one.parameters_per_second for one in report.results if (one.path, one.kernel) == (ADAM_PATH, kernel_names()[0])
    ]
    return rate


def main() -> int:
    """Measure, write the results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed, of each line of the benchmark")
    parser.add_argument("--steps", type=int, default=10, help=f"of training; the first {WARM_UP_STEPS} are warm-up")
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    passes, adam_rate = run_python("compute_mlp.py"), adam_parameters_per_second()
    crc_rate = len(os.sched_getaffinity(0)) * kernel_rates()[0]["bytes_per_second"]["in memory"]
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as directory:
        before = measured_rates(Path(directory), arguments.seconds)
        report = run_python("infinity_mlp.py", "--nvme", directory, *SETTING.options, "--steps", str(arguments.steps))
        after = measured_rates(Path(directory), arguments.seconds)
    rates = {op: mean((before[op], after[op])) for op in before}

    adam_seconds = {"forward": report["num_parameters"] / adam_rate, "backward": 0.0}
    phases = {
        name: Phase(
            volumes, disk_seconds(rates, volumes), median(passes[f"{name}_seconds"]), adam_seconds[name],
            (volumes.read_bytes + volumes.write_bytes) / crc_rate,
        )
        for name, volumes in zip(adam_seconds, volumes_of_phases(report["notes"]["traffic"]), strict=True)
    }  # fmt: skip
    predicted = sum(phase.seconds for phase in phases.values())
    reads, writes, seconds = (median(report[key][WARM_UP_STEPS:]) for key in ("read_bytes", "write_bytes", "step_seconds"))
    difference = abs(seconds / predicted - 1)
    claims = [Claim("step time against the benchmarks' prediction, difference", difference, MOST_DIFFERENCE, "ratio")]
    results = {
        "disk": describe_directory(arguments.nvme), "rates_before": before, "rates_after": after, "passes": passes,
        "adam_parameters_per_second": adam_rate, "crc_bytes_per_second": crc_rate, "read_bytes": reads,
        "write_bytes": writes, "phases": {name: asdict(phase) for name, phase in phases.items()},
        "step_seconds": seconds, "predicted_seconds": predicted, "claims": as_json(claims),
    }  # fmt: skip
    said = (
        f"A step takes {seconds:.2f} s; the benchmarks say {predicted:.2f} s (GB/s: "
        f"{', '.join(f'{op} {rate / 1e9:.2f}' for op, rate in rates.items())}; Adam {adam_rate / 1e9:.2f} G parameters/s; "
        f"CRC32C {crc_rate / 1e9:.1f} GB/s on all cores). It reads {reads / 1e9:.2f} GB and writes {writes / 1e9:.2f} GB."
    )
    table = markdown_table(
        ["phase", "reads, GB", "writes, GB", "disk, s", "passes, s", "Adam, s", "checksums, s", "predicted, s"],
        [
            [
                name, f"{phase.volumes.read_bytes / 1e9:.2f}", f"{phase.volumes.write_bytes / 1e9:.2f}",
                f"{phase.disk_seconds:.2f}", f"{phase.pass_seconds:.2f}", f"{phase.adam_seconds:.2f}",
                f"{phase.checksum_seconds:.2f}", f"{phase.seconds:.2f}",
            ]
            for name, phase in phases.items()
        ],
    )  # fmt: skip
    title = "What the benchmarks predict and what training takes"
    write_results("predict_training", results, title, f"{said}\n\n{table}\n\n{claims_table(claims)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
