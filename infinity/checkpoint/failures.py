"""System errors of file operations as StorageError: operation, path, offset, length, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import StorageError, SwapSpaceError

_REMEDIES = {
    errno.ENOSPC: "Free space on this file system or choose another directory.",
    errno.EDQUOT: "Free some of your quota on this file system or choose another directory.",
    errno.EACCES: "Give this user the permission or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.EIO: "The device reports an error: look at the kernel log.",
}
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def storage_errors(operation: str, path: Path, *, offset: int = 0, num_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the body into StorageError, or SwapSpaceError where the disk or quota is full."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        number = error.errno or 0
        where = f" ({num_bytes} bytes at offset {offset})" if num_bytes else ""
        kind = SwapSpaceError if number in _NO_SPACE else StorageError
        raise kind(
            f"{operation} {path}{where} failed: {error.strerror}.", remedy=_REMEDIES.get(number, ""), errno=number
        ) from error
