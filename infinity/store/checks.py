"""Is this directory fit to hold swap files? Answered by trying, in milliseconds, before anything heavy starts."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.filesystems import free_bytes, memory_filesystem
from infinity.aio.mounts import MOUNT_TABLE, mount_of, read_mounts
from infinity.errors import ConfigError, StorageError

_MOUNT_TABLE = MOUNT_TABLE


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What is known of a directory that passed the check."""

    path: Path  # absolute, links resolved
    file_system: str  # "ext4", "xfs", "tmpfs", ...; "unknown" where the system has no mount table
    free_bytes: int  # for this user
    is_memory: bool  # its files are RAM, so swap files there save none
    writable: bool  # a file could be made in it


def check_directory(path: Path) -> DirectoryFacts:
    """Return the facts of a directory; it is made when only its last part is missing, and nothing else is left in it.

    Raises StorageError in one sentence for a missing parent, a file, a device node, a directory that this user may not
    write to, and a file system that is mounted read-only.
    """
    absolute = Path(os.path.abspath(path))
    if not os.path.lexists(absolute):
        _make(absolute)
    try:
        resolved = Path(os.path.realpath(absolute, strict=True))
        mode = resolved.stat().st_mode
    except OSError as error:
        raise _refused(absolute, f"NVMe directory {absolute} cannot be reached", error) from error
    if not stat.S_ISDIR(mode):
        raise _not_a_directory(resolved, mode)
    _try_writing(resolved)
    return DirectoryFacts(
        path=resolved, file_system=file_system_of(resolved), free_bytes=free_bytes(resolved) or 0,
        is_memory=memory_filesystem(resolved) is not None, writable=True,
    )  # fmt: skip


def require_distinct(paths: Sequence[Path]) -> None:
    """Raise ConfigError, naming both spellings, where two existing paths are one directory: a link, or a bind mount."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        status = path.stat()
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise ConfigError(
                f"NVMe directories {first} and {path} are one and the same: nothing is gained by striping over it.",
                remedy="Give each directory once.",
            )


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds an absolute path."""
    mount = mount_of(path, read_mounts(_MOUNT_TABLE))
    return mount.file_system if mount else "unknown"


def device_of(path: Path) -> str:
    """Return what the file system of an absolute path is mounted from, such as "/dev/nvme0n1p1", or its device's number."""
    mount = mount_of(path, read_mounts(_MOUNT_TABLE))
    if mount and "/" in mount.source:
        return mount.source
    number = path.stat().st_dev
    return f"device {os.major(number)}:{os.minor(number)}"


def _make(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise StorageError(
            f"NVMe directory {path} does not exist and neither does {path.parent}.",
            remedy=f"Make it first: mkdir -p {path}", errno=errno.ENOENT,
        ) from error  # fmt: skip
    except OSError as error:
        raise _refused(path.parent, f"NVMe directory {path} cannot be made in {path.parent}", error) from error


def _try_writing(path: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".infinity-check-"):
            pass
    except OSError as error:
        raise _refused(path, f"NVMe directory {path} is not writable", error) from error


def _refused(path: Path, what: str, error: OSError) -> StorageError:
    number = error.errno or 0
    if number == errno.EROFS:
        return StorageError(
            f"{what}: its file system is mounted read-only.",
            remedy="Give a directory on a disk that is mounted read-write.", errno=number,
        )  # fmt: skip
    if number in (errno.EACCES, errno.EPERM):
        mode = f"{stat.S_IMODE(path.stat().st_mode):o}" if os.access(path, os.F_OK) else "unknown"
        return StorageError(
            f"{what} for user {os.geteuid()} (mode {mode}).",
            remedy=f"Give a directory of your own, or let the owner run: chown {os.geteuid()} {path}", errno=number,
        )  # fmt: skip
    return StorageError(f"{what}: {error.strerror}.", remedy="Give a directory on a local disk.", errno=number)


def _not_a_directory(path: Path, mode: int) -> StorageError:
    if stat.S_ISBLK(mode):
        node = path.stat().st_rdev
        device = f"{os.major(node)}:{os.minor(node)}"
        points = [str(mount.point) for mount in read_mounts(_MOUNT_TABLE) if mount.device == device]
        remedy = (
            f"Give a directory on it; it is mounted at {points[0]}."
            if points
            else "Make a file system on it, mount it, and give the mount point."
        )
        what = "a block device"
    elif stat.S_ISCHR(mode):
        what, remedy = "a character device", "Give a directory on a disk, for example the mount point of an SSD."
    else:
        what, remedy = "a file", f"Give a directory, for example {path.parent}."
    return StorageError(f"NVMe path {path} is {what}, not a directory.", remedy=remedy, errno=errno.ENOTDIR)
