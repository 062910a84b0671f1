"""Swap files: their whole size is reserved before the first byte is written, so that a full disk is found at the start."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.failures import remedy_of
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import free_bytes
from infinity.byte_sizes import GIB, format_bytes
from infinity.errors import StorageError, SwapSpaceError
from infinity.store.stripes import Stripe

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve_bytes(directory: Path) -> int:
    """Return what is left free for everybody else: a hundredth of the file system, at most 1 GiB."""
    facts = os.statvfs(directory)
    return min(GIB, facts.f_blocks * facts.f_frsize // 100)


def usable_bytes(directory: Path) -> int:
    """Return what swap files may take of the directory's file system: what is free but for `reserve_bytes`."""
    return max(0, (free_bytes(directory) or 0) - reserve_bytes(directory))


def stripes_with_room(directories: Sequence[Path], weights: Sequence[float], *, num_sharers: int = 1) -> tuple[Stripe, ...]:
    """Return the stripes of existing directories, limited by their free space: equal parts of it on one file system.

    `num_sharers` runs, the ranks of one machine, share that space.
    """
    devices = [directory.stat().st_dev for directory in directories]
    return tuple(
        Stripe(weight, usable_bytes(directory) // (devices.count(device) * num_sharers))
        for directory, device, weight in zip(directories, devices, weights, strict=True)
    )


def require_space(needs: Sequence[tuple[Path, int]]) -> None:
    """Raise SwapSpaceError, naming those directories and the others, where directories cannot take that many bytes.

    Those on one file system share its space.
    """
    by_device: dict[int, list[tuple[Path, int]]] = {}
    for path, needed in needs:
        by_device.setdefault(path.stat().st_dev, []).append((path, needed))
    rooms = [_Room(tuple(path for path, _ in members), sum(n for _, n in members)) for members in by_device.values()]
    lacking = [room for room in rooms if room.needed_bytes > room.usable_bytes]
    if lacking:
        enough = [room.words for room in rooms if room not in lacking]
        others = f" There is room enough in {' and '.join(enough)}." if enough else ""
        raise SwapSpaceError(
            f"{'; '.join(room.lack for room in lacking)}.{others}",
            remedy="Free some space, give a larger disk or another --nvme directory, or ask for less.",
            errno=errno.ENOSPC,
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """What is wanted of one file system."""

    paths: tuple[Path, ...]
    needed_bytes: int

    @property
    def words(self) -> str:
        return " and ".join(map(str, self.paths))

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.paths[0]) if self.needed_bytes else 0

    @property
    def lack(self) -> str:
        free, reserve = free_bytes(self.paths[0]) or 0, reserve_bytes(self.paths[0])
        return (
            f"{self.words}: {self.needed_bytes} bytes ({format_bytes(self.needed_bytes)}) are needed, "
            f"{free} bytes ({format_bytes(free)}) are free, of which {format_bytes(reserve)} stay free"
        )


def create_swap_file(path: Path, num_bytes: int) -> DirectFile:
    """Create a file of `num_bytes` with all its blocks reserved.

    It may take what `require_space` keeps free, for a commit in place is what rescues a run when the disk is nearly full.
    Raises SwapSpaceError, naming directory, needed and free bytes, when the file system or a quota has no room for it, and
    StorageError for anything else; then no file is left behind.
    """
    file = open_direct(path, create=True)
    try:
        if num_bytes:
            os.posix_fallocate(file.fd, 0, num_bytes)
    except OSError as error:
        file.close()
        path.unlink(missing_ok=True)
        raise _not_reserved(path, num_bytes, error) from error
    return file


def _not_reserved(path: Path, num_bytes: int, error: OSError) -> StorageError:
    kind = SwapSpaceError if error.errno in _FULL else StorageError
    free = free_bytes(path.parent) or 0
    return kind(
        f"{path}: cannot reserve {num_bytes} bytes ({format_bytes(num_bytes)}): {error.strerror}; "
        f"{free} bytes ({format_bytes(free)}) are free in {path.parent}.",
        remedy=remedy_of(error.errno or 0),
        errno=error.errno or 0,
    )
