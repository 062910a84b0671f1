"""Whether O_DIRECT works where a file lies, for reads and for writes, and in which blocks: found out by doing.

File systems accept the flag and then fail, some of them only writes. What a transfer has to be aligned to follows from the
device below them: 512 bytes, or 4,096 on disks with such sectors. So one page and one smaller block are written and read.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

from infinity.byte_sizes import PAGE_BYTES

_FLAG: int = getattr(os, "O_DIRECT", 0) if hasattr(os, "preadv") else 0  # 0 on systems without it
_SMALL_BLOCK_BYTES = 512
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY_PREFIX = ".infinity-probe-"


def open_unbuffered(path: Path, flags: int) -> tuple[int, int]:
    """Open `path` with O_DIRECT; return the descriptor and the block that transfers must be aligned to, 512 or 4,096 bytes.

    The descriptor is -1 where O_DIRECT is refused. A file that has content keeps it: then writes are tried on a temporary
    file beside it. Raises OSError where the file cannot be opened, or has no room for its first page.
    """
    fd = _open_with_flag(path, flags)
    if fd < 0:
        return -1, 0
    try:
        if os.fstat(fd).st_size == 0:
            block_bytes = _smallest_block(fd)
            os.ftruncate(fd, 0)
        else:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(fd, [page], 0)
            block_bytes = _smallest_block_beside(path, flags)
    except OSError as error:
        os.close(fd)
        if error.errno in _FULL:
            raise
        return -1, 0
    return fd, block_bytes


def _open_with_flag(path: Path, flags: int) -> int:
    if not _FLAG:
        return -1
    try:
        return os.open(path, flags | _FLAG, 0o600)
    except OSError as error:
        if error.errno in _REFUSED:
            return -1
        raise


def _smallest_block(fd: int) -> int:
    """Write and read one page and then, inside it, a smaller block. Raises OSError where the page is refused."""
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page)[_SMALL_BLOCK_BYTES : 2 * _SMALL_BLOCK_BYTES] as block:
        os.pwritev(fd, [page], 0)
        os.preadv(fd, [page], 0)
        try:
            os.pwritev(fd, [block], _SMALL_BLOCK_BYTES)
            os.preadv(fd, [block], _SMALL_BLOCK_BYTES)
        except OSError:
            return PAGE_BYTES
    return _SMALL_BLOCK_BYTES


def _smallest_block_beside(path: Path, flags: int) -> int:
    """Do the same in a temporary file; where no room or no right is left for one, the page is the safe answer."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    except OSError:
        return PAGE_BYTES
    os.close(descriptor)
    try:
        fd = _open_with_flag(Path(name), flags)
    finally:
        os.unlink(name)
    if fd < 0:
        raise OSError(errno.EINVAL, "O_DIRECT is refused in new files")
    try:
        return _smallest_block(fd)
    except OSError as error:
        if error.errno in _FULL:
            return PAGE_BYTES
        raise
    finally:
        os.close(fd)
