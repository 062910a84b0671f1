"""Does the disk give to training what the benchmark says it gives? A job that the disk bounds, beside `bench nvme`.

The job is that of compare_deepspeed.py with all its state on NVMe. From the bytes of a step and the benchmark's rates (read,
and mixed, 1 MiB blocks, depth 32) follows the time that the disk needs for a step: optimizer state is read and
written at the same time, weights are only read. The benchmark runs before and after training, for a shared disk drifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

from claims import Claim, as_json, claims_table
from compare_deepspeed import WARM_UP_STEPS, WORKERS, run_worker
from provenance import ROOT, describe_directory, write_results

from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic
from infinity.bench.nvme_places import check_places
from infinity.bench.nvme_results import Row
from infinity.bench.nvme_run import run

JOBS = tuple(Job(traffic, 1 << 20, 32) for traffic in Traffic)
MOST_DIFFERENCE = 0.2


class Silent:
    """Takes note of nothing."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def row(self, row: Row) -> None:
        """Say nothing."""


def measured_rates(nvme: Path, seconds: float) -> dict[str, float]:
    """Return the median rates of the benchmark by kind of traffic, in bytes per second."""
    settings = NvmeSettings((nvme,), seconds=seconds, long_run_seconds=0.0)
    with ExitStack() as resources:
        places = check_places(settings, JOBS, resources)
        report = run(settings, JOBS, places, None, Silent())
    return {result.row.op: result.row.bytes_per_second for result in report.results}


def predicted_seconds(rates: dict[str, float], read_bytes: float, write_bytes: float) -> float:
    """Return the time that these volumes take: as many bytes read as written at the mixed rate, the other reads alone."""
    mixed_bytes = 2 * min(read_bytes, write_bytes)
    return mixed_bytes / rates["mixed"] + max(0.0, read_bytes - write_bytes) / rates["read"]


def main() -> int:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed, of each line of the benchmark")
    parser.add_argument("--steps", type=int, default=10, help=f"of training; the first {WARM_UP_STEPS} are warm-up")
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as directory:
        before = measured_rates(Path(directory), arguments.seconds)
        command = [sys.executable, str(WORKERS / "infinity_mlp.py"), "--nvme", directory, "--steps", str(arguments.steps)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        report = run_worker([*command, "--cpu-memory", "1GiB", "--device", "nvme"], environment)
        after = measured_rates(Path(directory), arguments.seconds)
    rates = {op: mean((before[op], after[op])) for op in before}
    reads, writes, seconds = (median(report[key][WARM_UP_STEPS:]) for key in ("read_bytes", "write_bytes", "step_seconds"))
    predicted = predicted_seconds(rates, reads, writes)
    claims = [
        Claim("step time against the benchmark's rates, difference", abs(seconds / predicted - 1), MOST_DIFFERENCE, "ratio")
    ]
    results = {
        "disk": describe_directory(arguments.nvme), "rates_before": before, "rates_after": after, "read_bytes": reads,
        "write_bytes": writes, "step_seconds": seconds, "predicted_seconds": predicted, "claims": as_json(claims),
    }  # fmt: skip
    said = (
        f"A step reads {reads / 1e9:.2f} GB and writes {writes / 1e9:.2f} GB in {seconds:.2f} s; the benchmark's rates say "
        f"{predicted:.2f} s (GB/s: {', '.join(f'{op} {rate / 1e9:.2f}' for op, rate in rates.items())})."
    )
    write_results("predict_training", results, "The benchmark's rates and training", f"{said}\n\n{claims_table(claims)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
