"""Large files without filling the page cache: what was written goes to disk and leaves, what was read leaves.

Writeback runs beside the writer: when a window is full its writeback is started, and the window before it is waited for and
dropped. So at most two windows of a file are cached, and the dirty pages never pile up for one long fsync at the end.
"""

from __future__ import annotations

import ctypes
import errno
import os

from infinity.byte_sizes import MIB

WINDOW_BYTES = 16 * MIB

# sync_file_range(2); Python's os module does not have it.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class WriteBehind:
    """Follows the writes to one file. Owned by the file's writer; not thread-safe; keeps no file open."""

    __slots__ = ("_fd", "_started", "_window", "_window_bytes")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._window: list[tuple[int, int]] = []  # (offset, bytes) written since the last turn
        self._window_bytes = 0
        self._started: list[tuple[int, int]] = []  # the window before, in writeback

    def wrote(self, offset: int, num_bytes: int) -> None:
        """Take note of a write; raises OSError when earlier data could not be written back."""
        self._window.append((offset, num_bytes))
        self._window_bytes += num_bytes
        if self._window_bytes < WINDOW_BYTES:
            return
        for begin, length in self._window:
            _sync_range(self._fd, begin, length, _WRITE)
        for begin, length in self._started:
            _sync_range(self._fd, begin, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._fd, begin, length, os.POSIX_FADV_DONTNEED)
        self._started, self._window, self._window_bytes = self._window, [], 0


def drop(fd: int, offset: int = 0, num_bytes: int = 0) -> None:
    """Drop clean pages of a range from the cache; `num_bytes` 0 means up to the end of the file."""
    os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _sync_range(fd: int, offset: int, num_bytes: int, flags: int) -> None:
    if _libc.sync_file_range(fd, offset, num_bytes, flags) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.ENOSYS:
        raise OSError(number, os.strerror(number))
    os.fdatasync(fd)  # sandboxes without the call: slower, same effect
