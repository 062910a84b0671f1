"""Safetensors files written and read in pieces, at any element, with constant memory and without filling the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from infinity.byte_sizes import MIB
from infinity.checkpoint import page_cache
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.header import PREFIX_BYTES, Extent, Header, build_header, json_length, parse_header
from infinity.checkpoint.specs import TensorSpec
from infinity.errors import CheckpointError, CheckpointIncomplete

_CHUNK_BYTES = 4 * MIB  # so that a large piece is written back and dropped on the way


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file: enough to recognise it later."""

    num_bytes: int
    header_crc32: int


class StreamWriter:
    """One file being written. Owner: who opened it; not thread-safe; after an error only `close` is of use.

    Leaving the `with` block closes the file; it is whole and on disk only after `finish`.
    """

    __slots__ = ("_behind", "_covered", "_fd", "_header", "path")

    def __init__(self, path: Path, fd: int, header: Header) -> None:
        self.path = path
        self._fd = fd
        self._header = header
        self._behind = page_cache.WriteBehind(fd)
        self._covered: dict[str, list[tuple[int, int]]] = {name: [] for name in header.extents}

    def write(self, name: str, first_element: int, data: memoryview) -> None:
        """Write the elements of tensor `name` from `first_element` on; `data` is bytes.

        Raises CheckpointError for an unknown tensor or elements outside it, StorageError where the system refuses.
        """
        extent = _extent(self._header, name, self.path)
        num_elements, rest = divmod(data.nbytes, extent.spec.element_bytes)
        if rest:
            raise CheckpointError(
                f"Tensor {name}: a piece of {data.nbytes} bytes holds no whole number of {extent.spec.dtype} elements."
            )
        offset, num_bytes = extent.byte_range(first_element, num_elements)
        if num_elements == 0:
            return
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            chunk = data[begin : begin + _CHUNK_BYTES]
            self._put(offset + begin, chunk)
            with storage_errors("Writing back", self.path, offset=offset + begin, num_bytes=chunk.nbytes):
                self._behind.wrote(offset + begin, chunk.nbytes)
        _cover(self._covered[name], first_element, first_element + num_elements)

    def finish(self) -> Written:
        """Check that every element was written once, and bring the file to disk. Raises CheckpointError, StorageError."""
        for name, extent in self._header.extents.items():
            _require_whole(extent.spec, self._covered[name])
        with storage_errors("Syncing", self.path):
            os.fsync(self._fd)
            page_cache.drop(self._fd)
        return Written(self._header.file_bytes, self._header.crc32)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, offset: int, data: memoryview) -> None:
        with storage_errors("Writing", self.path, offset=offset, num_bytes=data.nbytes):
            while data.nbytes:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_stream_writer(path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> StreamWriter:
    """Create `path` at its full length (sparse) and write the header. Raises CheckpointError, StorageError."""
    header = build_header(specs, metadata)
    with storage_errors("Creating", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        writer = StreamWriter(path, fd, header)
        try:
            os.ftruncate(fd, header.file_bytes)
            writer._put(0, memoryview(header.encoded))
        except OSError:
            writer.close()
            raise
    return writer


class StreamReader:
    """One safetensors file open for reading ranges. Owner: who opened it; not thread-safe; errors leave it usable."""

    __slots__ = ("_cached_bytes", "_fd", "_header", "path")

    def __init__(self, path: Path, fd: int, header: Header) -> None:
        self.path = path
        self._fd = fd
        self._header = header
        self._cached_bytes = 0

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(extent.spec for extent in self._header.extents.values())

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._header.metadata

    @property
    def written(self) -> Written:
        return Written(self._header.file_bytes, self._header.crc32)

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor. Raises CheckpointError when the file has none of that name."""
        return _extent(self._header, name, self.path).spec

    def read(self, name: str, first_element: int, num_elements: int, into: memoryview) -> None:
        """Fill `into` (bytes) with a run of elements of tensor `name`.

        Raises CheckpointError for elements outside the tensor, CheckpointIncomplete at a premature end, StorageError.
        """
        extent = _extent(self._header, name, self.path)
        offset, num_bytes = extent.byte_range(first_element, num_elements)
        if into.nbytes != num_bytes:
            raise CheckpointError(
                f"Tensor {name}: {num_elements} elements need a buffer of {num_bytes} bytes, got one of {into.nbytes}."
            )
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            chunk = into[begin : begin + _CHUNK_BYTES]
            _get(self._fd, self.path, offset + begin, chunk)
            self._cached_bytes += chunk.nbytes
            if self._cached_bytes >= page_cache.WINDOW_BYTES:
                page_cache.drop(self._fd)
                self._cached_bytes = 0

    def close(self) -> None:
        if self._fd >= 0:
            page_cache.drop(self._fd)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_stream_reader(path: Path) -> StreamReader:
    """Open a safetensors file of any origin and check its header and length.

    Raises CheckpointIncomplete for a file that is missing or shorter than its header says, CheckpointError for one that
    is longer or no safetensors file, StorageError where the system refuses.
    """
    if not path.exists():
        raise CheckpointIncomplete(f"{path} is missing.")
    with storage_errors("Opening", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return StreamReader(path, fd, _read_header(path, fd))
    except BaseException:
        os.close(fd)
        raise


def _read_header(path: Path, fd: int) -> Header:
    found = os.fstat(fd).st_size
    prefix = bytearray(PREFIX_BYTES)
    _require_length(path, PREFIX_BYTES, found)
    _get(fd, path, 0, memoryview(prefix))
    length = json_length(bytes(prefix), where=str(path))
    _require_length(path, PREFIX_BYTES + length, found)
    encoded = bytearray(PREFIX_BYTES + length)
    _get(fd, path, 0, memoryview(encoded))
    header = parse_header(bytes(encoded), where=str(path))
    _require_length(path, header.file_bytes, found)
    if found > header.file_bytes:
        raise CheckpointError(f"{path} is too long: expected {header.file_bytes} bytes, found {found}.")
    return header


def _require_length(path: Path, expected: int, found: int) -> None:
    if found < expected:
        raise CheckpointIncomplete(f"{path} is truncated: expected {expected} bytes, found {found}.")


def _get(fd: int, path: Path, offset: int, into: memoryview) -> None:
    with storage_errors("Reading", path, offset=offset, num_bytes=into.nbytes):
        while into.nbytes:
            count = os.preadv(fd, [into], offset)
            if count == 0:
                raise CheckpointIncomplete(f"{path} ends at byte {offset}: {into.nbytes} more bytes were expected.")
            into, offset = into[count:], offset + count


def _extent(header: Header, name: str, path: Path) -> Extent:
    extent = header.extents.get(name)
    if extent is None:
        raise CheckpointError(f"{path} has no tensor {name}.")
    return extent


def _cover(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a range; pieces in ascending order, the usual case, stay one range."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((begin, end))


def _require_whole(spec: TensorSpec, ranges: Iterable[tuple[int, int]]) -> None:
    position = 0
    for begin, end in (*sorted(ranges), (spec.numel, spec.numel)):
        if begin != position:
            fault = "were never written" if begin > position else "were written twice"
            first, last = min(begin, position), max(begin, position)
            raise CheckpointError(f"Tensor {spec.name} of {spec.numel} elements: elements {first} to {last} {fault}.")
        position = end
