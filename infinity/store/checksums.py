"""CRC32C of what goes to swap files: computed when it is written, kept in RAM, compared when it has been read.

A checksum covers all bytes of a part, the padding of its last page too. It says that the bytes which are used are those that
were written, whatever a disk, a controller, a cable or a file system did to them in between; not that they were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError, PlatformError, SwapCorruptionError
from infinity.handles import AllOf, Handle
from infinity.memory.arena import Buffer
from infinity.store.beside import Helper, open_helper

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


@dataclass(frozen=True, slots=True)
class Checking:
    """What the cells of one store check with: reads are compared beside on one thread, writes summed up on another.

    Two, for a read waits for its disk first, and a sum that waited behind it would keep a slot from its next use.
    """

    checksums: Checksums
    reads: Helper
    writes: Helper


def open_checking(checksums: Checksums, resources: ExitStack) -> Checking:
    """Start the threads; `resources` ends them, when all that they were given is done. Raises PlatformError."""
    reads, writes = (resources.enter_context(closing(open_helper(f"checksums-of-{name}"))) for name in ("reads", "writes"))
    return Checking(checksums, reads, writes)


class PartChecksums:
    """The checksums of the parts of one extent, as they were written last; without `checking` nothing is known of any.

    Parts may overlap where readers' parts do. A part is known from the end of its write until something is written over it.
    Not thread-safe: whoever owns it has a lock, and asks for nothing before the last write is over.
    """

    def __init__(self, checking: Checking | None, known: dict[Part, int]) -> None:
        self._checking = checking
        self._known = known if checking is not None else {}

    def summed(self, write: Handle[None], source: Buffer, written: Part, parts: Sequence[Part]) -> Handle[None]:
        """Return the handle of a write from `source` that ends when the checksums of `parts`, which lie in it, are known.

        Nothing else is known of what is written over.
        """
        if self._checking is None:
            return write
        checksums, begin, end = self._checking.checksums, written[0], written[0] + written[1]
        kept = {part: value for part, value in self._known.items() if part[0] >= end or part[0] + part[1] <= begin}
        self._known = kept

        def sum_up() -> None:
            kept.update({part: checksums.of(source.address + part[0] - begin, part[1]) for part in parts})

        return AllOf([write, self._checking.writes.give(sum_up)])

    def checked(self, read: Handle[None], part: Part, into: Buffer, *, path: Path, offset: int, name: str) -> Handle[None]:
        """Return the handle of a read that ends when its bytes have been compared, and raises SwapCorruptionError."""
        expected = self._known.get(part)
        if self._checking is None or expected is None:
            return read
        checksums, value = self._checking.checksums, expected

        def compare() -> None:
            read.wait()
            require_checksum(checksums, value, into.address, part[1], path=path, offset=offset, name=name)

        return self._checking.reads.give(compare)

    def get(self, part: Part) -> int | None:
        return self._known.get(part)


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
