"""Where a number comes from: the command, commit, versions and hardware that every results file carries."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("infinity-train", "torch", "numpy")


def provenance() -> dict[str, Any]:
    """Return the provenance of what this process measures."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return {
        "command": " ".join(["python", name, *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "hardware": hardware(),
    }


def commit() -> str:
    """Return the commit of the checkout, marked where files differ from it."""
    return output_of("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def version(package: str) -> str:
    """Return the installed version of a distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def output_of(*command: str) -> str:
    """Return what a program prints, without line ends; empty where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory, kernel and, where there is one, the GPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "processor": next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "gpu": output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "none",
    }


def describe_directory(path: Path) -> dict[str, Any]:
    """Return the file system and the device below `path`, with the free bytes."""
    disk = os.statvfs(path)
    found = output_of("findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(path))
    return {"file_system": " ".join(found.split()), "free_bytes": disk.f_bavail * disk.f_frsize}


def write_results(name: str, results: dict[str, Any], title: str, table: str) -> None:
    """Write bench/results/<name>.json and <name>.md with their provenance, and print the table."""
    origin = provenance()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"provenance": origin, **results}, indent=2) + "\n")
    machine = origin["hardware"]
    foot = (
        f"`{origin['command']}` at {origin['commit']}, {origin['date']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, GPU {machine['gpu']}; torch {origin['versions']['torch']}."
    )
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n{table}\n\n{foot}\n")
    print(f"{table}\n\n{foot}")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])
