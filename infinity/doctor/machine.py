"""Where the checks get their facts: kernel files below a root, the environment, limits, and trials in other processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from infinity.doctor.surroundings import Surroundings, read_surroundings
from infinity.doctor.trials import RunTrial, run_trial

_DISTRIBUTION = "infinity-train"
_CAN_LOCK_MEMORY = 14  # CAP_IPC_LOCK


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process; None is no limit."""

    locked_bytes: int | None  # RLIMIT_MEMLOCK
    open_files: int | None  # RLIMIT_NOFILE


@dataclass(frozen=True, slots=True)
class Packages:
    """What infinity requires ("name>=1.2"; None where its own metadata is not installed) and what is installed."""

    required: tuple[str, ...] | None
    version: Callable[[str], str | None]  # of a package; None where it is absent


@dataclass(frozen=True)
class Machine:
    """The machine as it is; a test gives another root and other readers."""

    root: Path
    environment: Mapping[str, str]
    cores: int  # that this process may run on
    limits: Limits
    packages: Packages
    has_module: Callable[[str], bool]  # whether Python would find it; nothing is loaded
    total_bytes: Callable[[Path], int]  # of the file system at a path; raises OSError
    run_trial: RunTrial = field(default=run_trial)

    def text(self, name: str) -> str | None:
        """Return a file below the root; None where it is absent or may not be read."""
        try:
            return (self.root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    @cached_property
    def surroundings(self) -> Surroundings:
        return read_surroundings(self.root, self.environment)

    @property
    def may_lock_memory(self) -> bool:
        """Whether the limit of locked memory does not bind this process."""
        lines = (self.text("proc/self/status") or "").splitlines()
        held = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
        return bool(int(held, 16) >> _CAN_LOCK_MEMORY & 1)

    @property
    def has_nvidia_device(self) -> bool:
        return any((self.root / "dev").glob("nvidia[0-9]*"))


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(
        root=Path("/"),
        environment=os.environ,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        limits=Limits(_soft_limit(resource.RLIMIT_MEMLOCK), _soft_limit(resource.RLIMIT_NOFILE)),
        packages=Packages(_requirements(), _version),
        has_module=lambda name: find_spec(name) is not None,
        total_bytes=_total_bytes,
    )


def _soft_limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _requirements() -> tuple[str, ...] | None:
    try:
        return tuple(metadata.requires(_DISTRIBUTION) or ())
    except metadata.PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _total_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize
