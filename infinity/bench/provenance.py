"""Where a benchmark's numbers come from: command, versions and hardware, which every results file carries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from infinity import __version__

_CPUINFO = Path("/proc/cpuinfo")


def provenance(command: Sequence[str], packages: Sequence[str] = ()) -> dict[str, object]:
    """Return the provenance of what this process measures; `packages` are distributions whose versions matter."""
    return {
        "command": " ".join(command),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "infinity": __version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release(),
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
