"""gpt-4b where its 48 GB of state exceed the memory: peak memory, bytes per step, and step time against the disk."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from claims import Claim, as_json, claims_table
from provenance import ROOT, describe_directory, write_results
from rates import DiskRates, measure_rates
from training_run import TrainingRun, run_training

GIB = float(1 << 30)
NEEDED_BYTES = 60_000_000_000
STEPS = 2
JOB = ["--model", "gpt-4b", "--seq-len", "128", "--micro-batch-size", "1", "--micro-batches", "1", "--steps", str(STEPS)]
ON_NVME = ["--offload-optimizer", "nvme", "--offload-params", "nvme", "--cpu-memory", "3GiB"]


def claims_of(run: TrainingRun, rates: DiskRates) -> list[Claim]:
    """Return what was promised for this job, measured on the last step: the first makes the files warm."""
    last, plan = run.metrics[-1], run.plan
    reads, writes = last["nvme_read_bytes"], last["nvme_write_bytes"]
    return [
        Claim("peak RSS", run.summary["rss_peak_bytes"] / GIB, 4.5, "GiB"),
        Claim("bytes read against the plan, difference", abs(reads / plan["nvme_read_bytes"] - 1), 0.03, "ratio"),
        Claim("bytes written against the plan, difference", abs(writes / plan["nvme_write_bytes"] - 1), 0.03, "ratio"),
        Claim("step time against the disk alone", last["step_seconds"], 1.5 * rates.seconds(reads, writes), "s"),
    ]


def main() -> int:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    disk = describe_directory(arguments.nvme)
    if disk["free_bytes"] < NEEDED_BYTES:
        needed, free = NEEDED_BYTES / 1e9, disk["free_bytes"] / 1e9
        print(f"large is left out: {needed:.0f} GB must be free below --nvme, {free:.0f} GB are.")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as directory:
        swap = Path(directory)
        before = measure_rates(swap)
        run = run_training(swap, [*JOB, *ON_NVME])
        rates = before.mean_with(measure_rates(swap))
    claims = claims_of(run, rates)
    results = {"disk": disk, "rates": asdict(rates), "claims": as_json(claims), "run": asdict(run)}
    write_results("large", results, "gpt-4b in 3 GiB, everything on NVMe", f"`{run.command}`\n\n{claims_table(claims)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
