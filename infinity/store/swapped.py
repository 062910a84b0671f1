"""Bytes in a swap file: one extent each, whose reads and writes never overtake each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request
from infinity.errors import IllegalTransition, StorageError
from infinity.handles import Handle, Ready
from infinity.memory.arena import Buffer
from infinity.states import Lifecycle
from infinity.store.checksums import Checking, Part, PartChecksums
from infinity.store.extents import Extent
from infinity.store.failures import NamedHandle, SwapFailures
from infinity.telemetry.recorder import Recorder


class IoState(Enum):
    """OPEN: takes requests. CLOSED: its files may be closed, so it takes none."""

    OPEN = "open"
    CLOSED = "closed"


_IO_MOVES = {IoState.OPEN: (IoState.CLOSED,), IoState.CLOSED: (IoState.CLOSED,)}


class SwapIo:
    """The engine, the swap files and the counters of one store. Safe to use from any thread.

    Bytes are counted when they are submitted, in whole pages: what the disk transfers, not the logical lengths.
    """

    def __init__(self, engine: Engine, files: Sequence[DirectFile], recorder: Recorder) -> None:
        self.files = tuple(files)
        self._failures = SwapFailures(files)
        self._engine = engine
        self._recorder = recorder
        self._lifecycle = Lifecycle("Store", IoState.OPEN, _IO_MOVES)

    def read(self, extent: Extent, into: Buffer) -> Handle[None]:
        """Read an extent, or a part of one. Raises StorageError for a buffer that is too small."""
        self._recorder.count("nvme_read_bytes", extent.num_bytes)
        return self._submit(Op.READ, extent, into)

    def write(self, extent: Extent, source: Buffer, *, counters: Sequence[str] = ()) -> Handle[None]:
        """Write an extent, or a part of one; `counters` are counted beside `nvme_write_bytes`."""
        for name in ("nvme_write_bytes", *counters):
            self._recorder.count(name, extent.num_bytes)
        return self._submit(Op.WRITE, extent, source)

    def path_of(self, extent: Extent) -> Path:
        """Return the path of the file that holds the extent."""
        return self.files[extent.file].path

    def close(self) -> None:
        """Take no more requests."""
        self._lifecycle.to(IoState.CLOSED)

    def require_open(self) -> None:
        """Raise IllegalTransition once closed."""
        if self._lifecycle.state is IoState.CLOSED:
            raise IllegalTransition("The store is closed.")

    def _submit(self, op: Op, extent: Extent, buffer: Buffer) -> Handle[None]:
        self.require_open()
        file = self.files[extent.file]
        if buffer.num_bytes < extent.num_bytes:
            raise StorageError(
                f"{file.path}: {op.name.lower()} of {extent.num_bytes} bytes at {extent.offset} with a buffer of "
                f"{buffer.num_bytes} bytes.",
                remedy="Give a buffer of whole pages.",
            )
        request = Request(op, file, extent.offset, buffer.address, extent.num_bytes, buffer)
        return NamedHandle(self._engine.submit([request])[0], file, self._failures)


_WRITTEN = Ready(None)


class SwappedBytes:
    """The bytes of one extent. Safe to use from any thread.

    A read waits for the write before it and a write for the reads and the write before it, inside the call. After a failed
    write the extent's bytes are undefined: every later use raises that write's error. With `checking`, what is read is
    compared with what was written, or with `checksum` where a checkpoint in place says what the whole extent's is; the
    handle of a read raises SwapCorruptionError.
    """

    def __init__(
        self,
        io: SwapIo,
        extent: Extent,
        name: str,
        *,
        written: bool,
        before_write: Callable[[], None],
        counters: Sequence[str] = (),
        checking: Checking | None = None,
        checksum: int | None = None,
    ) -> None:
        self.extent = extent
        self.name = name
        self._io = io
        self._sums = PartChecksums(checking, {} if checksum is None else {(0, extent.num_bytes): checksum})
        self._before_write = before_write
        self._counters = tuple(counters)
        self._lock = threading.Lock()
        self._last_write: Handle[None] | None = _WRITTEN if written else None  # None: never written
        self._reads: list[Handle[None]] = []

    def read(self, into: Buffer, *, offset: int = 0, num_bytes: int | None = None) -> Handle[None]:
        """Read whole pages, from `offset` in the extent to its end unless `num_bytes` is given.

        Raises IllegalTransition when nothing was written yet.
        """
        with self._lock:
            self._settle()
            if self._last_write is None:
                raise IllegalTransition(f"{self.name}: read before anything was written.")
            extent = self._part(offset, num_bytes)
            handle = self._io.read(extent, into)
            self._reads = [read for read in self._reads if not read.done()] + [handle]
            path, part = self._io.path_of(extent), (offset, extent.num_bytes)
            return self._sums.checked(handle, part, into, path=path, offset=extent.offset, name=self.name)

    def write(
        self, source: Buffer, *, offset: int = 0, num_bytes: int | None = None, read_as: Sequence[Part] | None = None
    ) -> Handle[None]:
        """Write whole pages, from `offset` in the extent to its end unless `num_bytes` is given.

        `read_as` are the parts of the extent that will be read, unless what is written is read as a whole; reads of other
        parts are not checked.
        """
        with self._lock:
            self._settle()
            self._finish_reads()
            self._before_write()
            extent = self._part(offset, num_bytes)
            part = (offset, extent.num_bytes)
            write = self._io.write(extent, source, counters=self._counters)
            self._last_write = self._sums.summed(write, source, part, (part,) if read_as is None else read_as)
            return self._last_write

    def settle(self) -> None:
        """Wait for the write in flight. Raises its error."""
        with self._lock:
            self._settle()

    def finish(self) -> None:
        """Wait until nothing is in flight, whatever became of it: errors belong to those who hold the handles."""
        with self._lock:
            self._finish_reads()
            with contextlib.suppress(StorageError):
                self._settle()

    @property
    def checksum(self) -> int | None:
        """The checksum of the whole extent; None where it is not known. Waits for the write in flight."""
        with self._lock:
            self._settle()
            return self._sums.get((0, self.extent.num_bytes))

    @property
    def written(self) -> bool:
        """Whether a write was ever begun."""
        return self._last_write is not None

    def _part(self, offset: int, num_bytes: int | None) -> Extent:
        length = self.extent.num_bytes - offset if num_bytes is None else num_bytes
        if offset + length > self.extent.num_bytes:
            raise IllegalTransition(
                f"{self.name}: {length} bytes from offset {offset} are not inside its {self.extent.num_bytes} bytes."
            )
        return Extent(self.extent.file, self.extent.offset + offset, length)

    def _settle(self) -> None:
        if self._last_write is not None:
            self._last_write.wait()
            self._last_write = _WRITTEN  # lets go of the buffer that the handle keeps alive

    def _finish_reads(self) -> None:
        for read in self._reads:
            with contextlib.suppress(StorageError):  # the reader's error
                read.wait()
        self._reads.clear()
