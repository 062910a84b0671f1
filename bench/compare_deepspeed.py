"""Train one job with DeepSpeed and with infinity, optimizer on NVMe, in alternating rounds; compare step time and memory.

The job is workers/mlp_job.py: 402.8 M parameters, 4 rows, bf16, AdamW, clip 1.0. Every run is a process of its own, so that
its peak resident set is its own. DeepSpeed lives in a virtual environment that this script makes; where it cannot, a
sentence says why and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from provenance import ROOT, describe_directory, markdown_table, write_results
from rates import measure_rates

WORKERS = ROOT / "bench" / "workers"
DEEPSPEED = "deepspeed==0.19.8"
WARM_UP_STEPS = 2  # of every process: first touch of memory and files, traces of the order of parameters
COMPILE = (
    "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder; AsyncIOBuilder().load(); CPUAdamBuilder().load()"
)


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    name: str
    worker: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """What infinity promises against one setting of DeepSpeed: ratios of step seconds and of peak RSS."""

    ours: str
    theirs: str
    time_ratio: float
    memory_ratio: float


@dataclass(frozen=True)
class Comparison:
    """Settings to measure in turn, what is promised of them, and how one is run: command and environment in, report out."""

    name: str  # of the results files
    title: str
    settings: Sequence[Setting]
    targets: Sequence[Target]
    run: Callable[[list[str], dict[str, str]], dict[str, Any]]


SETTINGS = (
    Setting("deepspeed fastest", "deepspeed", ("--pipeline", "--buffer-count", "12", "--sub-group-size", "100000000")),
    Setting("infinity 2.4 GiB", "infinity", ("--cpu-memory", "2.4GiB", "--device", "auto")),
    Setting("deepspeed smallest", "deepspeed", ("--buffer-count", "5", "--sub-group-size", "20000000")),
    Setting("infinity 1 GiB, all on NVMe", "infinity", ("--cpu-memory", "1GiB", "--device", "nvme")),
)
TARGETS = (
    Target("infinity 2.4 GiB", "deepspeed fastest", time_ratio=0.5, memory_ratio=0.25),
    Target("infinity 1 GiB, all on NVMe", "deepspeed smallest", time_ratio=0.75, memory_ratio=0.3),
)


class Unavailable(Exception):
    """The peer cannot be installed here; the message is the sentence that says why."""


def prepare_deepspeed(venv: Path) -> tuple[Path, dict[str, str]]:
    """Return the interpreter and the variables to run DeepSpeed with, after installing and compiling what is missing."""
    python = venv / "bin" / "python"
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }
    ready = venv / "ready"
    if not ready.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        prepare([sys.executable, "-m", "venv", str(venv)], environment, "its virtual environment cannot be made")
        prepare(
            [*pip, "torch", "numpy", "setuptools", "wheel", "ninja", "py-cpuinfo"], environment, "torch cannot be installed"
        )
        prepare([*pip, "--no-build-isolation", DEEPSPEED], environment, f"{DEEPSPEED} cannot be installed")
        for lock in (venv / "torch_extensions").glob("*/lock"):  # of a build that was killed; the next would wait for it
            lock.unlink()
        prepare(
            [str(python), "-c", COMPILE], environment, "its async_io does not compile (Debian: apt-get install libaio-dev)"
        )
        ready.touch()
    return python, environment


def prepare(command: list[str], environment: dict[str, str], failure: str) -> None:
    """Run one command of the installation, or raise Unavailable with the reason and the last line it printed."""
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr or result.stdout).strip().rpartition("\n")[2]
        raise Unavailable(f"DeepSpeed is left out: {failure} ({last}).")


def run_worker(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run one worker to its end and return the report on its last line.

    DeepSpeed's I/O threads now and then abort the process while it exits. The report is whole by then, and counts; its
    `exit_status` says what happened.
    """
    result = subprocess.run(command, env=environment, cwd=WORKERS, check=False, capture_output=True, text=True)
    try:
        report: dict[str, Any] = json.loads(result.stdout.strip().rpartition("\n")[2])
    except ValueError as error:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-4000:]}") from error
    return {**report, "exit_status": result.returncode}


def measure(comparison: Comparison, arguments: argparse.Namespace, swap: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the reports of every round by setting; the settings alternate, so that drift of the machine meets all alike."""
    interpreters = {
        "deepspeed": prepare_deepspeed(arguments.venv.resolve()),
        "infinity": (Path(sys.executable), {**os.environ, "PYTHONPATH": str(ROOT)}),
    }
    reports: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in comparison.settings}
    for index in range(arguments.rounds):
        for setting in comparison.settings:
            python, environment = interpreters[setting.worker]
            script = str(WORKERS / f"{setting.worker}_mlp.py")
            directory = Path(tempfile.mkdtemp(dir=swap))
            options = ["--nvme", str(directory), "--steps", str(arguments.steps), *setting.options]
            report = comparison.run([str(python), script, *options], environment)
            shutil.rmtree(directory)
            reports[setting.name].append(report)
            seconds = median(report["step_seconds"][WARM_UP_STEPS:])
            print(f"round {index + 1}, {setting.name}: {seconds:.2f} s, {report['peak_rss_bytes'] / 1e9:.2f} GB", flush=True)
    return reports


def summarize(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return medians over all measured steps of all rounds, and over the rounds' memory peaks."""

    def of_steps(key: str) -> float:
        return median(value for report in reports for value in report[key][WARM_UP_STEPS:])

    return {
        "step_seconds": of_steps("step_seconds"),
        "peak_rss_bytes": median(report["peak_rss_bytes"] for report in reports),
        "read_bytes": of_steps("read_bytes"),
        "write_bytes": of_steps("write_bytes"),
        "last_loss": reports[0]["losses"][-1],
    }


def compare(medians: dict[str, dict[str, float]], targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return the ratios that the targets are about, and whether each is met."""
    rows = []
    for target in targets:
        ours, theirs = medians[target.ours], medians[target.theirs]
        time_ratio = ours["step_seconds"] / theirs["step_seconds"]
        memory_ratio = ours["peak_rss_bytes"] / theirs["peak_rss_bytes"]
        met = time_ratio <= target.time_ratio and memory_ratio <= target.memory_ratio
        rows.append({**asdict(target), "measured_time_ratio": time_ratio, "measured_memory_ratio": memory_ratio, "met": met})
    return rows


def tables(medians: dict[str, dict[str, float]], comparisons: list[dict[str, Any]]) -> str:
    """Return both tables in Markdown."""
    settings = markdown_table(
        ["setting", "step seconds", "peak RSS, GB", "read per step, GB", "written per step, GB", "last loss"],
        [
            [
                name,
                f"{values['step_seconds']:.2f}",
                f"{values['peak_rss_bytes'] / 1e9:.2f}",
                f"{values['read_bytes'] / 1e9:.2f}",
                f"{values['write_bytes'] / 1e9:.2f}",
                f"{values['last_loss']:.4f}",
            ]
            for name, values in medians.items()
        ],
    )
    ratios = markdown_table(
        ["against", "step time ratio", "at most", "peak RSS ratio", "at most", "met"],
        [
            [
                f"{row['ours']} / {row['theirs']}",
                f"{row['measured_time_ratio']:.2f}",
                f"{row['time_ratio']}",
                f"{row['measured_memory_ratio']:.2f}",
                f"{row['memory_ratio']}",
                "yes" if row["met"] else "no",
            ]
            for row in comparisons
        ],
    )
    return f"{settings}\n\n{ratios}"


def run_comparison(comparison: Comparison, description: str | None) -> int:
    """Read the command line, measure, write the results and print the tables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-deepspeed", help="DeepSpeed's virtual environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=10, help=f"per process and round; the first {WARM_UP_STEPS} are warm-up"
    )
    arguments = parser.parse_args()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    rates = measure_rates(arguments.nvme)
    disk = describe_directory(arguments.nvme)
    with tempfile.TemporaryDirectory(dir=arguments.nvme.resolve()) as swap:
        try:
            reports = measure(comparison, arguments, Path(swap))
        except Unavailable as reason:
            print(reason)
            return 0
    medians = {name: summarize(runs) for name, runs in reports.items()}
    comparisons = compare(medians, comparison.targets)
    results = {"disk": disk, "rates": asdict(rates), "medians": medians, "comparisons": comparisons, "rounds": reports}
    write_results(comparison.name, results, comparison.title, tables(medians, comparisons))
    return 0


def main() -> int:
    """Compare on one rank."""
    title = "One job, DeepSpeed 0.19.8 and infinity, optimizer on NVMe"
    return run_comparison(Comparison("compare_deepspeed", title, SETTINGS, TARGETS, run_worker), __doc__)


if __name__ == "__main__":
    sys.exit(main())
