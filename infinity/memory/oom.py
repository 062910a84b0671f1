"""Whether the kernel killed a process for lack of memory: the counters of its control groups, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from infinity.memory.limits import (
    cgroup_directories,
    parse_cgroup_mounts,
    parse_cgroup_paths,
    parse_key_values,
    read_cgroup_limit,
)

# The file with the line "oom_kill N" in a group of version 1 and 2.
_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}


class OomSign(Enum):
    """What the counters say of a process that a SIGKILL ended."""

    KILLED = "killed"  # the kernel has killed for lack of memory in this process's group, or in one below
    NOT_KILLED = "not killed"  # it has not
    UNKNOWN = "unknown"  # no counter could be read


@dataclass(frozen=True, slots=True)
class OomVerdict:
    """The sign, and the limit of the group in which the kernel killed: None where the machine's memory is the limit."""

    sign: OomSign
    limit_bytes: int | None = None


class OomWatch:
    """The counters of one process's groups. `look` while it lives, `verdict` afterwards; not thread-safe."""

    def __init__(self) -> None:
        self._first: dict[Path, int] = {}  # a group's counter -> what it said when it was first seen
        self._versions: dict[Path, int] = {}

    def look(self, process: Path) -> None:
        """Note the groups of the process whose directory below /proc is `process`: it may have been moved to others."""
        for counter, version in counters_of(process).items():
            number = _number(counter)
            if number is not None and counter not in self._first:
                self._first[counter] = number
                self._versions[counter] = version

    def verdict(self) -> OomVerdict:
        """Return what has happened since the first looks. The tightest of the groups that count a kill is named."""
        if not self._first:
            return OomVerdict(OomSign.UNKNOWN)
        rose = [counter for counter, first in self._first.items() if (_number(counter) or 0) > first]
        if not rose:
            return OomVerdict(OomSign.NOT_KILLED)
        limits = [read_cgroup_limit(counter.parent, self._versions[counter]) for counter in rose]
        return OomVerdict(OomSign.KILLED, min((limit for limit in limits if limit is not None), default=None))


def counters_of(process: Path) -> Mapping[Path, int]:
    """Return the files that count the kernel's kills in a process's groups, each with its version; see [Note: cgroups]."""
    try:
        paths = parse_cgroup_paths((process / "cgroup").read_text())
        mounts = parse_cgroup_mounts((process / "mountinfo").read_text())
    except OSError:  # the process is gone, or the kernel knows no groups
        return {}
    return {
        Path(directory) / _COUNTERS[mount.version]: mount.version
        for mount in mounts
        if mount.version in paths
        for directory in cgroup_directories(mount, paths[mount.version])
    }


def _number(counter: Path) -> int | None:
    try:
        return parse_key_values(counter.read_text()).get("oom_kill")
    except OSError:
        return None
