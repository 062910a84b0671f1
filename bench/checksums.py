"""What checksums cost: step time of the NVMe-bound job with and without them in turn, and the speed of CRC32C alone."""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from compare_deepspeed import SETTINGS, WORKERS, run_worker
from provenance import ROOT, describe_directory, markdown_table, write_results

from infinity.bench.spread import bootstrap_interval
from infinity.store.checksums import checksum_kernels, open_checksums

SETTING = next(setting for setting in SETTINGS if setting.name == "infinity 1 GiB, all on NVMe")
MOST_SLOWER = 1.03  # the promise: step time with checksums over step time without; met where the whole interval is below
SIZES = {"in a core's cache": 256 << 10, "a tile of 8 MiB": 8 << 20, "in memory": 1 << 30}


def train(nvme: Path, pairs: int, steps: int) -> dict[str, Any]:
    """Return what the worker reports."""
    command = [sys.executable, str(WORKERS / "infinity_checksums.py"), "--nvme", str(nvme), *SETTING.options]
    return run_worker([*command, "--pairs", str(pairs), "--steps", str(steps)], {**os.environ, "PYTHONPATH": str(ROOT)})


def ratios(phases: list[dict[str, Any]], key: str) -> list[float]:
    """Return, for each pair of phases, the mean with checksums over the mean without."""
    values = {(phase["pair"], phase["on"]): mean(phase[key]) for phase in phases}
    return [values[pair, True] / values[pair, False] for pair in sorted({pair for pair, _ in values})]


def kernel_rates(seconds: float = 0.5) -> list[dict[str, Any]]:
    """Return bytes per second of every kernel of this CPU, one thread, on the same memory over and over."""
    memory = mmap.mmap(-1, max(SIZES.values()))
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
    bytes_.random_(0, 256)
    found = []
    for name in checksum_kernels():
        checksums, row = open_checksums(name), {}
        for size, num_bytes in SIZES.items():
            checksums.of(bytes_.data_ptr(), num_bytes)
            begin, num_calls = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                checksums.of(bytes_.data_ptr(), num_bytes)
                num_calls += 1
            row[size] = num_calls * num_bytes / (time.perf_counter() - begin)
        found.append({"kernel": name, "bytes_per_second": row})
    return found


def tables(results: dict[str, Any]) -> str:
    """Return both tables in Markdown."""
    steps = markdown_table(
        ["", "with", "without", "median ratio of pairs", "95 % interval", "at most", "met"],
        [
            [
                words, f"{line['with']:.3f}", f"{line['without']:.3f}", f"{line['ratio']:.3f}",
                f"{line['ratio_low']:.3f} to {line['ratio_high']:.3f}", f"{MOST_SLOWER}" if line["promised"] else "",
                ("yes" if line["ratio_high"] <= MOST_SLOWER else "no") if line["promised"] else "",
            ]
            for words, line in results["steps"].items()
        ],
    )  # fmt: skip
    rates = markdown_table(
        ["CRC32C alone, one thread, GB/s", *SIZES],
        [[row["kernel"], *(f"{row['bytes_per_second'][size] / 1e9:.1f}" for size in SIZES)] for row in results["rates"]],
    )
    return f"{steps}\n\n{rates}"


def main() -> int:
    """Measure, write the results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--pairs", type=int, default=12, help="of a phase with and a phase without")
    parser.add_argument("--steps", type=int, default=2, help="measured in each phase")
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    disk = describe_directory(arguments.nvme)
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as directory:
        report = train(Path(directory), arguments.pairs, arguments.steps)
    steps = {}
    for words, key, promised in (("step seconds", "step_seconds", True), ("CPU seconds of a step", "cpu_seconds", False)):
        of_pairs = ratios(report["phases"], key)
        low, high = bootstrap_interval(of_pairs)
        of_mode = {
            on: median(value for phase in report["phases"] if phase["on"] is on for value in phase[key])
            for on in (True, False)
        }
        steps[words] = {
            "with": of_mode[True], "without": of_mode[False], "ratio": median(of_pairs), "ratio_low": low,
            "ratio_high": high, "ratios": of_pairs, "promised": promised,
        }  # fmt: skip
    results = {"disk": disk, "setting": SETTING.name, "steps": steps, "rates": kernel_rates(), "report": report}
    write_results("checksums", results, "What checksums cost where the disk is the limit", tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
