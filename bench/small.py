"""gpt-400m in 1 GiB with everything on NVMe: memory, page cache, bytes per step, and step time against the disk."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

from claims import Claim, as_json, claims_table
from provenance import ROOT, describe_directory, write_results
from rates import DiskRates, measure_rates
from training_run import TrainingRun, base_rss_bytes, run_training

GIB = float(1 << 30)
MIB = float(1 << 20)
EARLY_STEP, LATE_STEP = 5, 50
NEEDED_BYTES = 12 << 30
JOB = ["--model", "gpt-400m", "--seq-len", "256", "--micro-batch-size", "1", "--micro-batches", "4"]
ON_NVME = ["--offload-optimizer", "nvme", "--offload-params", "nvme", "--cpu-memory", "1GiB"]
# The compute alone: the same work, reruns included, without any disk.
IN_MEMORY = ["--offload-optimizer", "cpu", "--offload-params", "cpu", "--set", "infinity.recompute=true"]


def claims_of(run: TrainingRun, in_memory: TrainingRun, rates: DiskRates, base_bytes: int) -> list[Claim]:
    """Return what was promised for this job, measured."""
    late_rss = run.rss_bytes_of_step[LATE_STEP]
    reads, writes = (median(run.values(key, first_step=EARLY_STEP)) for key in ("nvme_read_bytes", "nvme_write_bytes"))
    step_seconds = median(run.values("step_seconds", first_step=EARLY_STEP))
    compute_seconds = median(in_memory.values("step_seconds", first_step=EARLY_STEP))
    booked, above_base = run.summary["cpu_memory_peak_bytes"], run.summary["rss_peak_bytes"] - base_bytes
    plan = run.plan
    return [
        Claim("peak RSS", run.summary["rss_peak_bytes"] / GIB, 2.0, "GiB"),
        Claim(
            f"RSS at step {LATE_STEP} / at step {EARLY_STEP}", late_rss / run.rss_bytes_of_step[EARLY_STEP], 1.02, "ratio"
        ),
        Claim("page cache of the swap files", run.swap_cache_bytes / MIB, 64, "MiB"),
        Claim("ledger peak against RSS above the base, difference", abs(booked / above_base - 1), 0.15, "ratio"),
        Claim("bytes read against the plan, difference", abs(reads / plan["nvme_read_bytes"] - 1), 0.03, "ratio"),
        Claim("bytes written against the plan, difference", abs(writes / plan["nvme_write_bytes"] - 1), 0.03, "ratio"),
        Claim("step time", step_seconds, max(1.5 * rates.seconds(reads, writes), 1.2 * compute_seconds), "s"),
    ]


def main() -> int:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    disk = describe_directory(arguments.nvme)
    if disk["free_bytes"] < NEEDED_BYTES:
        print(f"small is left out: {NEEDED_BYTES >> 30} GiB must be free below --nvme, {disk['free_bytes'] >> 30} GiB are.")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as directory:
        swap = Path(directory)
        before = measure_rates(swap)
        run = run_training(swap, [*JOB, *ON_NVME, "--steps", str(LATE_STEP + 1)])
        rates = before.mean_with(measure_rates(swap))
        in_memory = run_training(swap, [*JOB, *IN_MEMORY, "--steps", str(2 * EARLY_STEP)])
    claims = claims_of(run, in_memory, rates, base_rss_bytes())
    results = {
        "disk": disk,
        "rates": asdict(rates),
        "claims": as_json(claims),
        "run": asdict(run),
        "in_memory": asdict(in_memory),
    }
    write_results("small", results, "gpt-400m in 1 GiB, everything on NVMe", f"`{run.command}`\n\n{claims_table(claims)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
