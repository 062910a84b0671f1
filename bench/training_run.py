"""Run `infinity train` as a process of its own, watch its memory from outside, and read what it leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import ROOT

POLL_SECONDS = 0.1
CACHE_POLL_SECONDS = 2.0


@dataclass
class TrainingRun:
    """What one finished run was and did."""

    command: str
    plan: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # one a step
    rss_bytes_of_step: dict[int, int] = field(default_factory=dict)  # largest seen while the step ran
    swap_cache_bytes: int = 0  # most page cache that the swap files were ever seen to hold

    def values(self, key: str, *, first_step: int = 1) -> list[float]:
        """Return one field of the metrics for the steps from `first_step` on."""
        return [record[key] for record in self.metrics if record["step"] >= first_step]


def run_training(nvme: Path, options: list[str]) -> TrainingRun:
    """Train with `options` on the swap directory `nvme` and return the run; raise RuntimeError with its words."""
    output = Path(tempfile.mkdtemp(prefix="infinity-bench-"))
    arguments = ["train", "--nvme", str(nvme), *options, "--output", str(output)]
    try:
        with (output / "log").open("w+") as log:
            process = subprocess.Popen([sys.executable, "-m", "infinity", *arguments], cwd=ROOT, stdout=log, stderr=log)
            try:
                rss_bytes_of_step, swap_cache_bytes = watch(process, output / "metrics.jsonl", nvme)
            finally:
                process.kill()  # of no effect on one that has ended
            log.seek(0)
            if process.returncode:
                raise RuntimeError(f"infinity {' '.join(arguments)} ended with {process.returncode}:\n{log.read()[-4000:]}")
        return TrainingRun(
            command=" ".join(["infinity", "train", "--nvme", "DIR", *options]),
            plan=json.loads((output / "plan.json").read_text()),
            summary=json.loads((output / "summary.json").read_text()),
            metrics=[json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()],
            rss_bytes_of_step=rss_bytes_of_step,
            swap_cache_bytes=swap_cache_bytes,
        )
    finally:
        shutil.rmtree(output)


def watch(process: subprocess.Popen[bytes], metrics: Path, nvme: Path) -> tuple[dict[int, int], int]:
    """Poll until the process ends; return its largest RSS by step and the largest page cache of its swap files."""
    rss_bytes_of_step: dict[int, int] = {}
    swap_cache_bytes, next_cache_poll = 0, 0.0
    while process.poll() is None:
        step = 1 + (metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
        rss_bytes_of_step[step] = max(rss_bytes_of_step.get(step, 0), resident_bytes(process.pid))
        if time.monotonic() >= next_cache_poll:
            swap_cache_bytes = max(swap_cache_bytes, cached_bytes(nvme))
            next_cache_poll = time.monotonic() + CACHE_POLL_SECONDS
        time.sleep(POLL_SECONDS)
    return rss_bytes_of_step, swap_cache_bytes


def resident_bytes(pid: int) -> int:
    """Return VmRSS of a process, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def cached_bytes(directory: Path) -> int:
    """Return the page cache that files below `directory` hold, as util-linux's fincore counts it."""
    files = [str(path) for path in directory.rglob("*.bin") if path.is_file()]
    if not files:
        return 0
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *files]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    return sum(int(line) for line in result.stdout.split())


def base_rss_bytes() -> int:
    """Return what a process has before any model exists, as the engine itself measures it; budgets count above it."""
    code = (
        "import infinity.train.assemble; from infinity.memory.base import measure_base;"
        "from infinity.memory.host_allocator import tune_host_allocator; tune_host_allocator(); print(measure_base())"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return int(result.stdout)
