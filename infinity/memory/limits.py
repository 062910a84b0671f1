"""How much host memory this process can still take, and how much it holds; read from the kernel, no torch.

[Note: cgroups] A process may sit deep in a tree of control groups, and each level may have a limit: all are asked.
/proc/self/cgroup gives the path from the hierarchy's root, /proc/self/mountinfo where that hierarchy (or, in a container,
a part of it) is mounted. Version 1 spells "no limit" as a huge number, version 2 as "max".
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infinity.byte_sizes import KIB

_PROC = Path("/proc/self")
_MEMINFO = Path("/proc/meminfo")
HEADROOM_SHARE = 0.1  # of free memory, what is left to the system and to what nobody can foresee
_UNLIMITED_BYTES = 1 << 60  # version 1's "no limit" is 2**63 rounded down to a page


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The bytes that can still be taken, and what sets the limit ("RAM available", a cgroup's file, "ulimit -v")."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class CgroupMount:
    """A mounted hierarchy of control groups that can limit memory."""

    version: int  # 1 or 2
    root: str  # the group that is visible at the mount point
    mount_point: str


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """The names of a hierarchy's files and of the page cache in its memory.stat."""

    limit: str
    usage: str
    cache_keys: tuple[str, ...]


_FILES = {
    1: CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def host_limit_bytes(*, proc: Path = _PROC, meminfo: Path = _MEMINFO) -> HostLimit:
    """Return the least that RAM, every control group above this process and the address space limit leave to it.

    What the process holds already is not part of it: it is how much *more* can be taken. Page cache counts as free,
    because the kernel drops it first. `proc` and `meminfo` are where the files on groups and on RAM are.
    """
    limits = [HostLimit(parse_key_values(meminfo.read_text())["MemAvailable"] * KIB, "RAM available")]
    limits.extend(_cgroup_limits(proc))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        held = parse_key_values((_PROC / "status").read_text())["VmSize"] * KIB
        limits.append(HostLimit(max(0, address_space - held), "address space (ulimit -v)"))
    return min(limits, key=lambda limit: limit.num_bytes)


def plannable_host_bytes() -> int:
    """Return what a plan may take where nobody gave a budget: the limit, less some headroom."""
    return int(host_limit_bytes().num_bytes * (1 - HEADROOM_SHARE))


def rss_bytes() -> int:
    """Return the memory that this process holds now (resident set)."""
    return parse_key_values((_PROC / "status").read_text())["VmRSS"] * KIB


def pss_bytes() -> int:
    """Return the memory of this process, of pages that several processes share its part; 0 where the kernel does not say."""
    try:
        text = (_PROC / "smaps_rollup").read_text()
    except OSError:
        return 0
    return parse_key_values(text).get("Pss", 0) * KIB


def peak_rss_bytes() -> int:
    """Return the most memory that this process held since it began or since `reset_peak_rss`."""
    return parse_key_values((_PROC / "status").read_text())["VmHWM"] * KIB


def reset_peak_rss() -> bool:
    """Let `peak_rss_bytes` start again from what is held now; return False where the kernel does not allow that."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def parse_key_values(text: str) -> dict[str, int]:
    """Return the numbers of "Key:  123 kB" and "key 123" lines, as meminfo, status and memory.stat have them."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        words = line.replace(":", " ", 1).split()
        if len(words) >= 2 and words[1].isdigit():
            values[words[0]] = int(words[1])
    return values


def parse_cgroup_paths(text: str) -> dict[int, str]:
    """Return the process's group per version (1: the memory controller's), from the text of /proc/self/cgroup."""
    paths: dict[int, str] = {}
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def parse_cgroup_mounts(text: str) -> tuple[CgroupMount, ...]:
    """Return the hierarchies that can limit memory, from the text of /proc/self/mountinfo."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, *_, options = after.split()
        if kind == "cgroup2":
            mounts.append(CgroupMount(2, _unescaped(root), _unescaped(mount_point)))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.append(CgroupMount(1, _unescaped(root), _unescaped(mount_point)))
    return tuple(mounts)


def cgroup_directories(mount: CgroupMount, path: str) -> tuple[PurePosixPath, ...]:
    """Return the directories of the process's group and of every group above it that the mount shows, innermost first.

    A group outside the visible part (another namespace's) leaves only the mount point. See [Note: cgroups].
    """
    top, group = PurePosixPath(mount.mount_point), PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(mount.root):
        return (top,)
    innermost = top / group.relative_to(mount.root)
    return (innermost, *(parent for parent in innermost.parents if parent.is_relative_to(top)))


def cgroup_room(limit_text: str, usage_text: str, stat_text: str, version: int) -> int | None:
    """Return what a group's limit leaves, from the texts of its limit, its usage and its memory.stat; None: no limit."""
    limit_bytes = _parse_limit(limit_text)
    if limit_bytes is None:
        return None
    statistics = parse_key_values(stat_text)
    cache_bytes = sum(statistics.get(key, 0) for key in _FILES[version].cache_keys)
    return max(0, limit_bytes - max(0, int(usage_text) - cache_bytes))


def read_cgroup_limit(directory: Path, version: int) -> int | None:
    """Return the limit of the group at `directory` in bytes; None where it has none."""
    try:
        return _parse_limit((directory / _FILES[version].limit).read_text())
    except OSError:  # the top of a hierarchy has no limit file
        return None


def _parse_limit(text: str) -> int | None:
    limit = text.strip()
    return int(limit) if limit.isdigit() and int(limit) < _UNLIMITED_BYTES else None


def _cgroup_limits(proc: Path) -> Iterator[HostLimit]:
    try:
        paths = parse_cgroup_paths((proc / "cgroup").read_text())
        mounts = parse_cgroup_mounts((proc / "mountinfo").read_text())
    except OSError:  # a kernel without control groups
        return
    for mount in mounts:
        if mount.version not in paths:
            continue
        files = _FILES[mount.version]
        for directory in map(Path, cgroup_directories(mount, paths[mount.version])):
            try:
                limit, usage, statistics = (
                    (directory / name).read_text() for name in (files.limit, files.usage, "memory.stat")
                )
            except OSError:  # the top of a hierarchy has no limit file; a group may be invisible
                continue
            room = cgroup_room(limit, usage, statistics, mount.version)
            if room is not None:
                yield HostLimit(room, f"cgroup v{mount.version} ({directory / files.limit})")


def _unescaped(text: str) -> str:
    """Undo the octal escapes that mountinfo uses for blanks in paths."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
