"""Turns the number of a failed file operation into the error that says what, where, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from infinity.aio.filesystems import free_bytes
from infinity.byte_sizes import PAGE_BYTES
from infinity.errors import StorageError, SwapSpaceError

# The code of a read beyond the end of a file: no errno, and below every -errno (the kernel's go to -4095).
END_OF_FILE = -4096

_REMEDIES = {
    errno.EACCES: "Give a file or directory that this user may read and write.",
    errno.EAGAIN: "The system was short of resources each time it was tried: lower aio.queue_depth.",
    errno.EBADF: "Open the file for reading and writing, and close it only after its last request.",
    errno.ECANCELED: "The engine was closed first: wait for every handle before closing it.",
    errno.EDQUOT: "Raise the quota, free space, or give another directory.",
    errno.EFAULT: "The buffer is not mapped: keep it alive until its request is over.",
    errno.EFBIG: "Raise the limit of file sizes (`ulimit -f`), or give a file system that takes larger files.",
    errno.EINTR: "Signals interrupted it each time it was tried: look for a timer that fires without end.",
    errno.EINVAL: (
        f"Under O_DIRECT address, offset and length must be multiples of {PAGE_BYTES} bytes; the file system must allow it."
    ),
    errno.EIO: "The device reported an error: look at the kernel log and the disk's health, or give another directory.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`).",
    errno.ENOENT: "Create it, or give another path.",
    errno.ENOSPC: "Free space, or give a directory on a larger disk.",
    errno.EPERM: "Give a file or directory that this user may read and write.",
    errno.EROFS: "The file system is mounted read-only: give another directory.",
    errno.ESTALE: "The network mount has lost the file: mount it again, or give a directory on a local disk.",
    errno.ETIMEDOUT: "The device or the network mount does not answer: look at the kernel log, or give another directory.",
}


def storage_error(
    action: str, path: Path, code: int, *, offset: int | None = None, length: int | None = None
) -> StorageError:
    """Return the error for `action` on `path`; `code` is -errno or END_OF_FILE.

    `offset` and `length` are bytes; SwapSpaceError where there was no room.
    """
    amount = "" if length is None else f" of {length} bytes"
    place = f" {path}" if offset is None else f" at offset {offset} of {path}"
    if code == END_OF_FILE:
        return StorageError(f"{action}{amount}{place} failed: end of file.", remedy="The file is shorter than it should be.")
    number = -code
    message = f"{action}{amount}{place} failed: {os.strerror(number)} (errno {number})."
    remedy = remedy_of(number)
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = free_bytes(path.parent)
        room = "" if free is None else f" {free} bytes are free."
        return SwapSpaceError(message + room, remedy=remedy, errno=number)
    return StorageError(message, remedy=remedy, errno=number)


def remedy_of(number: int) -> str:
    """Return what to do about a file operation that failed with this errno."""
    return _REMEDIES.get(number, "Check the disk and the directory.")
