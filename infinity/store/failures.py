"""Which directory failed, which others have not, and what that means for the run: said in the error of every request."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Sequence

from infinity.aio.files import DirectFile
from infinity.errors import StorageError
from infinity.handles import Handle
from infinity.store.checks import device_of, file_system_of


class SwapFailures:
    """The swap files of one store, and those of them on which a request has failed. Safe to use from any thread."""

    def __init__(self, files: Sequence[DirectFile]) -> None:
        self._files = tuple(files)
        self._lock = threading.Lock()
        self._failed: set[DirectFile] = set()

    def named(self, error: StorageError, file: DirectFile) -> StorageError:
        """Return the error of a request on `file` with the user's directory and its device in front."""
        if error.errno == errno.ECANCELED:  # the engine was closed: no fault of the directory
            return error
        with self._lock:
            self._failed.add(file)
            others = [other for other in self._files if other not in self._failed]
        directory = _directory(file)
        fine = f" Nothing has failed in {' and '.join(_directory(other) for other in others)}." if others else ""
        without = f", without --nvme {directory} if it stays broken" if len(self._files) > 1 else ""
        return type(error)(
            f"NVMe directory {directory}{_device_words(file)} failed: {error.message}{fine} The run needs what was there.",
            remedy=f"{error.remedy} Then go on from the last checkpoint{without}.".lstrip(),
            errno=error.errno or 0,
        )


class NamedHandle:
    """The handle of a request on a swap file, whose error names the directory."""

    __slots__ = ("_error", "_failures", "_file", "_handle")

    def __init__(self, handle: Handle[None], file: DirectFile, failures: SwapFailures) -> None:
        self._handle = handle
        self._file = file
        self._failures = failures
        self._error: StorageError | None = None

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> None:
        try:
            self._handle.wait()
        except StorageError as error:
            self._error = self._error or self._failures.named(error, self._file)
            raise self._error from error


def _directory(file: DirectFile) -> str:
    return str(file.path.parent.parent)  # of the run directory that holds the file


def _device_words(file: DirectFile) -> str:
    with contextlib.suppress(OSError):
        directory = file.path.parent.parent
        return f" ({device_of(directory)}, {file_system_of(directory)})"
    return ""
