"""Files and directories read as one long run of bytes; a byte is a token. Nothing is loaded: every read is a `pread`."""

from __future__ import annotations

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infinity.errors import DataError

_PYTHON_ONLY = ".py"
_THIRD_PARTY = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Source:
    """One file and the number of its bytes when the corpus was opened."""

    path: Path
    num_bytes: int


class Corpus:
    """A range of the bytes of several files laid end to end."""

    def __init__(self, sources: Sequence[Source], first: int, num_bytes: int) -> None:
        self.sources = tuple(sources)
        self.num_bytes = num_bytes
        self._first = first
        self._ends = tuple(accumulate(source.num_bytes for source in sources))

    def read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return `num_bytes` tokens from `offset` on, uint8. Raises DataError where a file changed or went away."""
        pieces, position, end = [], self._first + offset, self._first + offset + num_bytes
        while position < end:
            index = bisect_right(self._ends, position)
            source, source_end = self.sources[index], self._ends[index]
            length = min(end, source_end) - position
            pieces.append(_read(source, position - (source_end - source.num_bytes), length))
            position += length
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def split(self, fraction: float) -> tuple[Corpus, Corpus]:
        """Return (all but the last `fraction` of the bytes, that last part)."""
        held_out = int(self.num_bytes * fraction)
        kept = self.num_bytes - held_out
        return Corpus(self.sources, self._first, kept), Corpus(self.sources, self._first + kept, held_out)


def open_corpus(paths: Iterable[Path]) -> Corpus:
    """Return the bytes of `paths`: files as they are, directories recursively in sorted order, without hidden entries.

    Raises DataError when a path is missing or unreadable.
    """
    files = [file for path in paths for file in _files_below(path)]
    return _corpus(files)


def standard_library() -> Corpus:
    """Return Python's own standard library, its .py files: real text that is on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    return _corpus([
        file for file in _files_below(root)
        if file.suffix == _PYTHON_ONLY and not any(part in _THIRD_PARTY for part in file.relative_to(root).parts)
    ])  # fmt: skip


def require_sequences(corpus: Corpus, seq_len: int, what: str) -> None:
    """Raise DataError unless the corpus holds one sequence and the token after it."""
    if corpus.num_bytes <= seq_len:
        raise DataError(
            f"{what}: found {corpus.num_bytes} bytes in {len(corpus.sources)} files, needed {seq_len + 1} "
            f"(one sequence of {seq_len} and the token after it).",
            remedy="Give more text, or a shorter --seq-len.",
        )


def _corpus(files: Sequence[Path]) -> Corpus:
    sources = []
    for file in files:
        try:
            num_bytes = file.stat().st_size
        except OSError as error:
            raise _unreadable(file, error) from error
        if num_bytes:
            sources.append(Source(file, num_bytes))
    return Corpus(sources, 0, sum(source.num_bytes for source in sources))


def _files_below(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"data: {path} does not exist.", remedy="Give a file or a directory of files.")
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"data: {path} is neither a file nor a directory.", remedy="Give a file or a directory.")
        _check_readable(path)
        return [path]
    found = []
    for directory, children, names in os.walk(path, onerror=_raise_unreadable):
        children[:] = sorted(child for child in children if not child.startswith("."))
        found += [Path(directory, name) for name in sorted(names) if not name.startswith(".")]
    return [file for file in found if file.is_file()]


def _check_readable(path: Path) -> None:
    if not os.access(path, os.R_OK):
        raise DataError(f"data: {path} cannot be read by this user.", remedy=f"Allow it: chmod +r {path}")


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data: {path} cannot be read: {error.strerror}.", remedy="Check its permissions.")


def _read(source: Source, offset: int, length: int) -> bytes:
    try:
        with source.path.open("rb", buffering=0) as file:
            piece = os.pread(file.fileno(), length, offset)
    except OSError as error:
        raise _unreadable(source.path, error) from error
    if len(piece) != length:
        raise DataError(
            f"data: {source.path} had {source.num_bytes} bytes when training started and is shorter now.",
            remedy="Leave the files alone while training; start again with --resume auto.",
        )
    return piece
