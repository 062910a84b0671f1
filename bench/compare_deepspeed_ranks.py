"""Train one job on two ranks with DeepSpeed and with infinity, stage 3, optimizer on NVMe, in alternating rounds.

The job is workers/mlp_job.py: 402.8 M parameters, 4 rows on each rank, bf16, AdamW, clip 1.0, over gloo. Each rank has one
thread of torch, as launchers give it. Step time is that of the slower rank; memory is the sum over ranks of peak resident
sets (VmHWM), in which pages that ranks share, those of libraries, count once a rank on both sides.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from compare_deepspeed import WORKERS, Comparison, Setting, Target, run_comparison

NUM_RANKS = 2
RUN_SECONDS = 900  # a run that takes longer hangs
REPORT_BEGINS = '{"num_parameters"'
SETTINGS = (
    Setting("deepspeed fastest", "deepspeed", ("--pipeline", "--buffer-count", "12", "--sub-group-size", "100000000")),
    Setting("infinity 4.5 GiB", "infinity", ("--stage", "3", "--cpu-memory", "4.5GiB", "--device", "auto")),
)
TARGETS = (Target("infinity 4.5 GiB", "deepspeed fastest", time_ratio=0.5, memory_ratio=0.25),)


def run_ranks(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run one worker on every rank to its end and return what their reports say together.

    As with one rank, the report on a worker's last line counts whatever the status with which it exits.
    """
    variables = environment | {
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_SIZE": str(NUM_RANKS),  # DeepSpeed's, for ranks without GPUs
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with tempfile.TemporaryDirectory() as outputs:
        logs = [Path(outputs, str(rank)) for rank in range(NUM_RANKS)]
        ranks = [
            start(command, variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log) for rank, log in enumerate(logs)
        ]
        try:
            statuses = [rank.wait(timeout=RUN_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        printed = [log.read_text() for log in logs]
    reports = []
    for status, text in zip(statuses, printed, strict=True):
        found = [line for line in text.splitlines() if line.startswith(REPORT_BEGINS)]
        if not found:
            raise RuntimeError(f"{' '.join(command)} ended with {status}:\n{text[-4000:]}")
        reports.append(json.loads(found[-1]))
    return {**together(reports), "exit_status": statuses}


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a rank; what it prints goes into a file."""
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, cwd=WORKERS, stdout=output, stderr=subprocess.STDOUT)


def together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the reports of the ranks as one: the slowest rank's seconds, everybody's bytes, the mean of the losses."""
    combined = {"losses": fmean, "step_seconds": max, "read_bytes": sum, "write_bytes": sum}
    by_step = {
        key: [combine(values) for values in zip(*(report[key] for report in reports), strict=True)]
        for key, combine in combined.items()
    }
    return {
        **reports[0],
        **by_step,
        "peak_rss_bytes": sum(report["peak_rss_bytes"] for report in reports),
        "peak_rss_bytes_by_rank": [report["peak_rss_bytes"] for report in reports],
    }


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def main() -> int:
    """Compare on two ranks."""
    title = (
        f"One job on {NUM_RANKS} ranks, DeepSpeed 0.19.8 and infinity, stage 3, optimizer on NVMe; memory summed over ranks"
    )
    return run_comparison(Comparison("compare_deepspeed_ranks", title, SETTINGS, TARGETS, run_ranks), __doc__)


if __name__ == "__main__":
    sys.exit(main())
