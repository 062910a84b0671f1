"""Files that bypass the page cache where the file system lets them, and otherwise leave little behind in it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from infinity.aio.failures import storage_error
from infinity.aio.filesystems import memory_filesystem
from infinity.byte_sizes import PAGE_BYTES

# Under O_DIRECT a transfer stops only at a logical block, or at the end of the file.
_BLOCK_BYTES = 512


class DirectFile:
    """An open file for reading and writing. Close it after its last request: a closed descriptor's number is soon another's.

    `direct`: whether O_DIRECT is in force; `in_memory`: the file system is tmpfs or the like, which has no cache to spare.
    """

    __slots__ = ("direct", "fd", "granule_bytes", "in_memory", "path")

    def __init__(self, path: Path, fd: int, *, direct: bool, in_memory: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self.in_memory = in_memory
        self.granule_bytes = _BLOCK_BYTES if direct else 1  # what the progress of a short transfer counts in

    def sync(self) -> None:
        """Make what was written durable (fdatasync). Raises StorageError."""
        if self.fd < 0:
            raise storage_error("sync", self.path, -errno.EBADF)
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise storage_error("sync", self.path, -(error.errno or errno.EIO)) from error
        self.drop_cache(0, 0)

    def drop_cache(self, offset: int, length: int) -> None:
        """Let the page cache forget a range (length 0: to the end); dirty pages start on their way to the disk."""
        if self.direct or self.in_memory or self.fd < 0:
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

    Whether it works is tried, because file systems accept the flag and then fail: one page is read, and in an empty file
    one is written first and cut off again. Raises StorageError.
    """
    path = Path(path)
    in_memory = memory_filesystem(path.parent) is not None
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        fd = _open_if_direct_works(path, flags) if direct and not in_memory else -1
        if fd >= 0:
            return DirectFile(path, fd, direct=True, in_memory=False)
        return DirectFile(path, os.open(path, flags, 0o600), direct=False, in_memory=in_memory)
    except OSError as error:
        raise storage_error("open", path, -(error.errno or errno.EIO)) from error


def _open_if_direct_works(path: Path, flags: int) -> int:
    """Return a descriptor with O_DIRECT, or -1 where the file system refuses it."""
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            if os.fstat(fd).st_size == 0:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
                os.ftruncate(fd, 0)
            else:
                os.preadv(fd, [page], 0)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return -1
    return fd
