"""The table of mounted file systems: what is mounted where, from which device, with which options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table."""

    point: Path
    device: str  # "major:minor"
    file_system: str  # "ext4", "xfs", "tmpfs", ...
    source: str  # "/dev/nvme0n1p1", "server:/export", ...
    options: frozenset[str]  # of this mount and of its file system


def read_mounts(table: Path = MOUNT_TABLE) -> tuple[Mount, ...]:
    """Return every mount in the order of the table; none where the system has no table."""
    if not table.exists():
        return ()
    lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return tuple(map(_parse, lines))


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds an absolute path: the one with the longest mount point above it."""
    above = [mount for mount in mounts if path == mount.point or mount.point in path.parents]
    # A later mount on the same point hides an earlier one; the table is in mount order and max keeps the first of equals.
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def _parse(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    _, _, device, _, point, options = left.split()[:6]
    file_system, source, *super_options = right.split()
    words = ",".join([options, *super_options]).split(",")
    return Mount(Path(_plain(point)), device, file_system, _plain(source), frozenset(words))


def _plain(text: str) -> str:
    """Undo the octal escapes of blanks."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
