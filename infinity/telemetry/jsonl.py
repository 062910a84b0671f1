"""Lines of JSON in a file: one object a line, appended and flushed, cut back to a step when a run resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from infinity.errors import StorageError


class JsonLines:
    """A file of JSON objects that grows at its end. Owned by one thread; `append` returns when the line is in the file.

    The file is valid JSON for every reader: NaN and infinities become null.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file

    def append(self, record: Mapping[str, object]) -> None:
        """Write one object as a line. Raises StorageError, for example when the disk is full."""
        with _storage_errors("append to", self.path):
            self._file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
            self._file.flush()

    def truncate_after(self, step: int) -> int:
        """Drop everything from the first record whose "step" is above `step`; return how many whole records that were.

        Records without a "step" stay when they come earlier.
        """
        with _storage_errors("cut back", self.path):
            num_dropped, keep_bytes = 0, None
            for start, record in _records(self._file):
                if keep_bytes is None and _step(record) > step:
                    keep_bytes = start
                num_dropped += keep_bytes is not None
            if keep_bytes is not None:
                self._file.truncate(keep_bytes)
        return num_dropped

    def close(self) -> None:
        with _storage_errors("close", self.path):
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_jsonl(path: Path) -> JsonLines:
    """Open `path` for appending, and make it if need be; a last line without an end, torn by a crash, is dropped.

    Raises StorageError when that is not possible.
    """
    with _storage_errors("open", path):
        file = path.open("a+b")  # every write goes to the end
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return JsonLines(path, file)


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """Return the whole records of a file; a torn last line is left out. Raises StorageError."""
    with _storage_errors("read", path), path.open("rb") as file:
        return [record for _, record in _records(file)]


def _records(file: BinaryIO) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (offset of its first byte, object) for every whole line; raise ValueError for a line that is no object."""
    file.seek(0)
    start = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"line {number} is {line[:40]!r}")
        yield start, record
        start += len(line)


def _step(record: Mapping[str, object]) -> int:
    step = record.get("step", -1)
    return step if isinstance(step, int) else -1


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _storage_errors(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"Cannot {operation} {path}: {error.strerror}.",
            remedy="Check the free space and the permissions of its directory.",
            errno=error.errno or 0,
        ) from error
    except ValueError as error:
        raise StorageError(
            f"Cannot {operation} {path}: it does not hold one JSON object a line ({error}).",
            remedy="Move the file away, or name another one.",
        ) from error
