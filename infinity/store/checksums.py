"""CRC32C of what goes to swap files: computed when it is written, kept in RAM, compared when it has been read.

A checksum covers all bytes of a part, the padding of its last page too. It says that the bytes which are used are those that
were written, whatever a disk, a controller, a cable or a file system did to them in between; not that they were right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.errors import ConfigError, PlatformError, StorageError, SwapCorruptionError
from infinity.handles import Handle

try:
    from infinity import _crc32c
except ImportError as _error:  # not built here; `open_checksums` says so
    _NATIVE_ERROR: ImportError | None = _error
else:
    _NATIVE_ERROR = None

Part = tuple[int, int]  # of an extent: first byte, number of bytes


class Checksums:
    """CRC32C on one instruction set; any thread may call. Results do not depend on the instruction set."""

    def __init__(self, native: _crc32c.Crc32c) -> None:
        self._native = native

    @property
    def name(self) -> str:
        """The instruction set in use."""
        return self._native.name

    def of(self, address: int, num_bytes: int) -> int:
        """Return the CRC32C of the bytes at `address`, without the GIL. They must stay alive and as they are meanwhile."""
        return self._native.extend(0, address, num_bytes)


def checksum_kernels() -> tuple[str, ...]:
    """Return the instruction sets that this CPU can run, the fastest first. Raises PlatformError where none is built."""
    if _NATIVE_ERROR is not None:
        raise PlatformError(
            f"The native module infinity._crc32c is missing: {_NATIVE_ERROR}.",
            remedy="Build it with a C++17 compiler: pip install --no-build-isolation -e . Or train with --no-checksums.",
        ) from _NATIVE_ERROR
    return tuple(_crc32c.names())


def open_checksums(name: str | None = None) -> Checksums:
    """Return CRC32C on the fastest instruction set of this CPU, or on the named one. Raises PlatformError, ConfigError."""
    names = checksum_kernels()
    if name is not None and name not in names:
        raise ConfigError(f"This CPU has no CRC32C kernel {name!r}.", remedy=f"Choose one of {', '.join(names)}.")
    return Checksums(_crc32c.Crc32c(name or names[0]))


class PartChecksums:
    """The checksums of the parts of one extent, as they were written last. Not thread-safe; whoever owns it has a lock.

    Parts may overlap where readers' parts do. A part is known from its write until something is written over it.
    """

    def __init__(self, checksums: Checksums | None, known: dict[Part, int]) -> None:
        self._checksums = checksums
        self._known = known if checksums is not None else {}

    def record(self, address: int, written: Part, parts: Sequence[Part]) -> None:
        """Know the checksums of `parts`, which lie in what was written from `address`, and of nothing else of that."""
        if self._checksums is None:
            return
        begin, end = written[0], written[0] + written[1]
        kept = {part: value for part, value in self._known.items() if part[0] >= end or part[0] + part[1] <= begin}
        new = {part: self._checksums.of(address + part[0] - begin, part[1]) for part in parts}
        self._known = kept | new

    def get(self, part: Part) -> int | None:
        return self._known.get(part)

    def check(self, part: Part, expected: int, address: int, *, path: Path, offset: int, name: str) -> None:
        """Raise SwapCorruptionError unless the bytes at `address` have the expected checksum."""
        if self._checksums is not None:
            require_checksum(self._checksums, expected, address, part[1], path=path, offset=offset, name=name)


def require_checksum(
    checksums: Checksums, expected: int, address: int, num_bytes: int, *, path: Path, offset: int, name: str
) -> None:
    """Raise SwapCorruptionError unless the bytes that were read from `offset` of the file have the expected checksum."""
    found = checksums.of(address, num_bytes)
    if found != expected:
        raise SwapCorruptionError(
            f"{path}: {name}, {num_bytes} bytes at offset {offset}, is not what was written: CRC32C {expected:08x} "
            f"expected, {found:08x} found.",
            remedy="Look for errors of the disk (the kernel's log, its SMART data) and of the RAM, then resume from a "
            "checkpoint that lies elsewhere.",
        )


class CheckedRead:
    """A read that is done when its bytes have been compared, too. Waiting twice gives the same result or error.

    The thread that finds the bytes there compares them, in `wait` or in `done`: whoever sees that it is done may change the
    buffer. While one thread compares, it is not yet done for others.
    """

    def __init__(self, read: Handle[None], check: Callable[[], None]) -> None:
        self._read = read
        self._check: Callable[[], None] | None = check  # None when it has been made
        self._lock = threading.Lock()
        self._error: StorageError | None = None

    def wait(self) -> None:
        with self._lock:
            self._settle()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if self._check is None:
            return True
        if not self._read.done() or not self._lock.acquire(blocking=False):
            return False
        try:
            self._settle()
        finally:
            self._lock.release()
        return True

    def _settle(self) -> None:
        if self._check is None:
            return
        try:
            self._read.wait()
            self._check()
        except StorageError as error:
            self._error = error
        self._check = None
