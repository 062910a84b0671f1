"""Files that bypass the page cache where the file system lets them, and otherwise leave little behind in it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from infinity.aio.direct import open_unbuffered
from infinity.aio.failures import storage_error
from infinity.aio.filesystems import memory_filesystem
from infinity.byte_sizes import PAGE_BYTES


class DirectFile:
    """An open file for reading and writing. Close it after its last request: a closed descriptor's number is soon another's.

    `direct`: whether O_DIRECT is in force; `in_memory`: the file system is tmpfs or the like, which has no cache to spare;
    `granule_bytes`: what offsets, lengths and addresses are multiples of, and what the progress of a short transfer counts
    in: the device's block under O_DIRECT, otherwise 1; `device`: the st_dev of its file system.
    """

    __slots__ = ("device", "direct", "fd", "granule_bytes", "in_memory", "path")

    def __init__(
        self, path: Path, fd: int, *, direct: bool, in_memory: bool, device: int, block_bytes: int = PAGE_BYTES
    ) -> None:
        self.path = path
        self.fd = fd
        self.device = device
        self.direct = direct
        self.in_memory = in_memory
        self.granule_bytes = block_bytes if direct else 1

    def sync(self) -> None:
        """Make what was written durable (fdatasync). Raises StorageError."""
        if self.fd < 0:
            raise storage_error("sync", self.path, -errno.EBADF)
        try:
            # What other descriptors of the file have written counts too: the kernel keeps dirty pages per file.
            getattr(os, "fdatasync", os.fsync)(self.fd)
        except OSError as error:
            raise storage_error("sync", self.path, -(error.errno or errno.EIO)) from error
        self.drop_cache(0, 0)

    def drop_cache(self, offset: int, length: int) -> None:
        """Let the page cache forget a range (length 0: to the end); dirty pages start on their way to the disk."""
        if self.in_memory or self.fd < 0 or not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # advice that is not taken costs memory, not correctness
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptor; closing twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_direct(path: Path | str, *, create: bool, direct: bool = True) -> DirectFile:
    """Open `path` for reading and writing, with O_DIRECT where that is asked for and works, otherwise buffered.

    Both directions are tried (`infinity/aio/direct.py`), which leaves nothing behind. Raises StorageError.
    """
    path = Path(path)
    in_memory = memory_filesystem(path.parent) is not None
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | (os.O_CREAT if create else 0)
    try:
        fd, block_bytes = open_unbuffered(path, flags) if direct and not in_memory else (-1, 0)
        is_direct = fd >= 0
        if not is_direct:
            fd = os.open(path, flags, 0o600)
        device = os.fstat(fd).st_dev
        return DirectFile(path, fd, direct=is_direct, in_memory=in_memory, device=device, block_bytes=block_bytes)
    except OSError as error:
        raise storage_error("open", path, -(error.errno or errno.EIO)) from error
