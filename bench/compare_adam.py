"""Adam on the CPU: ours in turn with a bare loop over the same bytes, torch's fused and foreach AdamW and DeepSpeedCPUAdam.

All contenders take turns in one process, on buffers of equal size (workers/adam_rounds.py), inside DeepSpeed's virtual
environment, which this script makes; where it cannot, a sentence says why and nothing is measured. Then processes with and
without OMP_NUM_THREADS=1 take turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from claims import Claim, as_json, claims_table
from compare_deepspeed import WORKERS, Unavailable, prepare_deepspeed, run_worker
from provenance import ROOT, markdown_table, write_results

from infinity.bench.adam_paths import PATHS
from infinity.bench.spread import spread_of

OMP = "OMP_NUM_THREADS"
_MOVED = {path.name: path.bytes_moved for path in PATHS}
BYTES = {"fp32": _MOVED["fp32"], "bf16": _MOVED["bf16_split"]}
SAME_SPEED = 1.03

Seconds = dict[str, list[float]]


def ratios(seconds: Seconds, ours: str, theirs: str) -> list[float]:
    """Return our time as a share of theirs, round by round."""
    return [mine / other for mine, other in zip(seconds[ours], seconds[theirs], strict=True)]


def claims_of(seconds: Seconds, omp_pairs: dict[str, list[float]]) -> list[tuple[Claim, tuple[float, float]]]:
    """Return what was promised, as times that may at most be so long, each with its bootstrap interval."""
    wanted = [
        ("fp32, time against the bare loop", ratios(seconds, "ours_fp32", "limit_fp32"), 1 / 0.93),
        ("fp32, time against torch fused", ratios(seconds, "ours_fp32", "torch_fused"), 1.0),
        ("fp32, time against torch foreach", ratios(seconds, "ours_fp32", "torch_foreach"), 1.0),
        ("fp32, time against DeepSpeedCPUAdam", ratios(seconds, "ours_fp32", "deepspeed_fp32"), 1.0),
        ("bf16, time against DeepSpeed's passes", ratios(seconds, "ours_bf16", "deepspeed_bf16"), 1 / 1.7),
        *((f"{name}, time with {OMP}=1 against without", pairs, SAME_SPEED) for name, pairs in omp_pairs.items()),
    ]
    found = []
    for what, values, most in wanted:
        spread = spread_of(values)
        found.append((Claim(what, spread.median, most, "ratio"), (spread.low, spread.high)))
    return found


def measure_omp(command: list[str], environment: dict[str, str], num_pairs: int) -> dict[str, list[float]]:
    """Return our time with OMP_NUM_THREADS=1 as a share of that without, by path; processes take turns."""
    without = {name: value for name, value in environment.items() if name != OMP}
    pairs: dict[str, list[float]] = {"ours_fp32": [], "ours_bf16": []}
    for number in range(num_pairs):
        order = [without, {**without, OMP: "1"}]
        reports = [run_worker(command, one) for one in (order if number % 2 == 0 else reversed(order))]
        plain, single = reports if number % 2 == 0 else reversed(reports)
        for name, values in pairs.items():
            values.append(median(single["seconds"][name]) / median(plain["seconds"][name]))
    return pairs


def tables(report: dict[str, Any], num_parameters: int, claims: list[tuple[Claim, tuple[float, float]]]) -> str:
    """Return both tables in Markdown."""
    rows = []
    for name, values in report["seconds"].items():
        spread = spread_of(values)
        rate = num_parameters / spread.median
        moved = BYTES["bf16" if name.endswith("bf16") else "fp32"]
        rows.append(
            [
                name,
                f"{spread.median * 1e3:.1f}",
                f"{spread.least * 1e3:.1f} - {spread.greatest * 1e3:.1f}",
                f"{rate / 1e6:.0f}",
                f"{rate * moved / 1e9:.1f}",
            ]
        )
    times = markdown_table(["contender", "ms", "least - greatest", "M parameters/s", "GB/s at the bytes of one pass"], rows)
    intervals = markdown_table(
        ["claim", "95 % interval of the median"],
        [[claim.what, f"{low:.3f} - {high:.3f}"] for claim, (low, high) in claims],
    )
    setting = (
        f"{num_parameters:,} parameters, kernel {report['kernel']}, {report['threads']} threads; one pass moves "
        f"{BYTES['fp32']} bytes a parameter in fp32, {BYTES['bf16']} in bf16."
    )
    return f"{setting}\n\n{times}\n\n{claims_table([claim for claim, _ in claims])}\n\n{intervals}"


def main() -> int:
    """Measure, write the results and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-deepspeed", help="DeepSpeed's virtual environment")
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--pairs", type=int, default=5, help="of processes with and without OMP_NUM_THREADS=1")
    arguments = parser.parse_args()
    try:
        python, environment = prepare_deepspeed(arguments.venv.resolve())
    except Unavailable as reason:
        print(reason)
        return 0
    environment = {**environment, "PYTHONPATH": str(ROOT)}
    worker = [str(python), str(WORKERS / "adam_rounds.py"), "--parameters", str(arguments.parameters)]
    without_omp = {name: value for name, value in environment.items() if name != OMP}
    report = run_worker([*worker, "--rounds", str(arguments.rounds)], without_omp)
    omp_pairs = measure_omp([*worker, "--rounds", "9", "--ours-alone"], environment, arguments.pairs)
    claims = claims_of(report["seconds"], omp_pairs)
    results = {
        "parameters": arguments.parameters,
        "bytes_per_parameter": BYTES,
        "claims": as_json([claim for claim, _ in claims]),
        "intervals": {claim.what: interval for claim, interval in claims},
        "omp_pairs": omp_pairs,
        "rounds": report,
    }
    title = "Adam on the CPU: ours, a bare loop, torch, DeepSpeed 0.19.8"
    write_results("compare_adam", results, title, tables(report, arguments.parameters, claims))
    return 0


if __name__ == "__main__":
    sys.exit(main())
