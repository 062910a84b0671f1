"""The owner file of a run directory: which process made it, and whether that process still lives."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.store.durable import write_json_durably

OWNER_NAME = "owner.json"
_FORMAT = "infinity-run/1"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who made a run directory."""

    pid: int
    boot_id: str
    start_time: int  # of the process, in clock ticks since boot; tells a reused pid from the old one
    command: tuple[str, ...]
    created: str  # UTC, ISO 8601
    run_name: str
    state: str  # "created", or "adopted" when the run took over a checkpoint in place


def read_owner(path: Path) -> Owner | None:
    """Return the owner of a run directory, None where there is no valid owner.json."""
    try:
        descriptor = os.open(path / OWNER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            fields = json.load(file)
        if fields.pop("format") != _FORMAT:
            return None
        return Owner(**{**fields, "command": tuple(fields["command"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_owner(path: Path, run_name: str, state: str) -> None:
    """Write this process into the run directory. `state` is "created" or "adopted"."""
    pid = os.getpid()
    owner = Owner(
        pid=pid, boot_id=_boot_id(), start_time=_start_time(pid) or 0, command=tuple(sys.orig_argv),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), run_name=run_name, state=state,
    )  # fmt: skip
    write_json_durably(path / OWNER_NAME, {"format": _FORMAT, **asdict(owner)})


def is_alive(owner: Owner) -> bool:
    """Return whether the very process that wrote the file runs: same boot, same pid, same start time."""
    return owner.boot_id == _boot_id() and owner.start_time == _start_time(owner.pid)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the name in parentheses, may hold spaces and parentheses itself; the state is the third, the start
    # time the 22nd. A zombie has ended: who started it may never take notice, as in a container without an init.
    rest = fields.rpartition(")")[2].split()
    return None if rest[0] == "Z" else int(rest[19])
