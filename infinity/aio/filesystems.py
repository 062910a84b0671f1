"""What the file system below a path is: memory or a disk, and how much room it has."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# statfs(2): f_type is the first field, a long; the rest of the structure fits 256 bytes everywhere.
_MEMORY_MAGICS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_STATFS_BYTES = 256

_libc = ctypes.CDLL(None, use_errno=True)


def memory_filesystem(path: Path) -> str | None:
    """Return the name of the file system of an existing path where it keeps its files in memory, otherwise None."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    magic = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ulong))[0]
    return _MEMORY_MAGICS.get(magic & 0xFFFFFFFF)


def free_bytes(path: Path) -> int | None:
    """Return what an unprivileged user may still write on the file system of `path`; None where nobody says."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
