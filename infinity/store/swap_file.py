"""Swap files: their whole size is reserved before the first byte is written, so that a full disk is found at the start."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import free_bytes
from infinity.byte_sizes import GIB, format_bytes
from infinity.errors import StorageError, SwapSpaceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve_bytes(directory: Path) -> int:
    """Return what is left free for everybody else: a hundredth of the file system, at most 1 GiB."""
    facts = os.statvfs(directory)
    return min(GIB, facts.f_blocks * facts.f_frsize // 100)


def require_space(needs: Sequence[tuple[Path, int]]) -> None:
    """Raise SwapSpaceError when the directories cannot take that many bytes; those on one file system share its space."""
    by_device: dict[int, list[tuple[Path, int]]] = {}
    for path, needed in needs:
        by_device.setdefault(path.stat().st_dev, []).append((path, needed))
    for members in by_device.values():
        path, needed = members[0][0], sum(num_bytes for _, num_bytes in members)
        free, reserve = free_bytes(path) or 0, reserve_bytes(path)
        if needed and needed > free - reserve:
            raise SwapSpaceError(
                f"{' and '.join(str(member) for member, _ in members)}: {needed} bytes ({format_bytes(needed)}) are needed, "
                f"{free} bytes ({format_bytes(free)}) are free, of which {format_bytes(reserve)} stay free.",
                remedy="Free some space, give a larger disk or a second --nvme directory, or train a smaller model.",
                errno=errno.ENOSPC,
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
        remedy="Free some space, raise the quota, or give another --nvme directory.",
        errno=error.errno or 0,
    )
