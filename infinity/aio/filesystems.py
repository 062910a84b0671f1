"""What the file system below a path is: memory, a network mount or neither, and how much room it has."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from infinity.aio.mounts import mount_of, read_mounts

# As the table of mounts names them.
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "lustre",
        "beegfs", "gpfs", "afs", "fuse.s3fs", "fuse.gcsfuse",
    )
)  # fmt: skip

# statfs(2) of Linux: f_type is the first field, a long; the rest of the structure fits 256 bytes everywhere.
_MEMORY_MAGICS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
# For a Linux without /proc: the same names, as far as the number tells them.
_NETWORK_MAGICS = {0x6969: "nfs", 0xFF534D42: "cifs", 0xFE534D42: "smb3", 0x00C36400: "ceph", 0x0BD00BD0: "lustre"}
_STATFS_BYTES = 256

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def memory_filesystem(path: Path) -> str | None:
    """Return the name of the file system of an existing path where it keeps its files in memory, otherwise None."""
    return _MEMORY_MAGICS.get(_magic(path))


def network_filesystem(path: Path) -> str | None:
    """Return the name of the file system of an existing path where its files are on another machine, otherwise None."""
    mounts = read_mounts()
    if not mounts:
        return _NETWORK_MAGICS.get(_magic(path))
    mount = mount_of(path.resolve(), mounts)
    return mount.file_system if mount and mount.file_system in NETWORK_FILE_SYSTEMS else None


def _magic(path: Path) -> int:
    """Return the number by which Linux knows the file system; 0 where nobody says."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc is None or _libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_ulong)], sys.byteorder) & 0xFFFFFFFF


def free_bytes(path: Path) -> int | None:
    """Return what an unprivileged user may still write on the file system of `path`; None where nobody says."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
