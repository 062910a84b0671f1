"""Which engine this machine and this directory allow, found out by doing, with a sentence for whatever is not available."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.buffered import open_buffered
from infinity.aio.direct import TEMPORARY_PREFIX
from infinity.aio.engine import Engine, EngineFacts, MemoryRange
from infinity.aio.failures import storage_error
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import memory_filesystem, network_filesystem
from infinity.aio.request import Op, Request, address_of
from infinity.aio.threads import open_threads
from infinity.aio.uring import open_uring
from infinity.byte_sizes import MIB, PAGE_BYTES
from infinity.errors import ConfigError, InfinityError, PlatformError, StorageError

# In the order in which "auto" tries them, with the words for what does the work when one that was tried before does not.
_OPENERS: Mapping[str, Callable[..., Engine]] = {"uring": open_uring, "threads": open_threads, "buffered": open_buffered}
_INSTEAD = {"threads": "Threads do the I/O instead.", "buffered": 'The engine "buffered" does the I/O instead.'}
_SUBJECTS = {"uring": "io_uring", "threads": 'The engine "threads"', "buffered": 'The engine "buffered"'}
KINDS = ("auto", *_OPENERS)

_PROBE_BYTES = 16 * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Probe:
    """What works in a directory. `notes`: one sentence, with its remedy, for each thing that does not."""

    engine: str
    direct: bool
    registers_files: bool
    registers_buffers: bool  # small ones; the locked memory that the real ones need is theirs to find out
    notes: tuple[str, ...]


def works_in_all(found: Sequence[Probe]) -> Probe:
    """Return what works in each of several directories: the engine is the last of theirs in the order of preference."""
    return Probe(
        engine=max((one.engine for one in found), key=KINDS.index),
        direct=all(one.direct for one in found),
        registers_files=all(one.registers_files for one in found),
        registers_buffers=all(one.registers_buffers for one in found),
        notes=tuple(note for one in found for note in one.notes),
    )


def open_engine(kind: str, *, queue_depth: int = 32, block_bytes: int = MIB) -> Engine:
    """Open the engine of that kind: "uring", "threads", "buffered", or "auto" for the first of these that can be had.

    `queue_depth` counts pieces of `block_bytes` in flight. Raises ConfigError for an unknown kind and PlatformError where
    an engine that was asked for by name, or any at all, cannot be had.
    """
    *others, last = _candidates(kind)
    for name in others:
        with suppress(PlatformError):
            return _OPENERS[name](queue_depth=queue_depth, block_bytes=block_bytes)
    return _OPENERS[last](queue_depth=queue_depth, block_bytes=block_bytes)


def probe(directory: Path, kind: str = "auto") -> Probe:
    """Write and read a temporary file in `directory` and say what worked; the file is removed.

    Raises StorageError where the directory cannot be used, ConfigError for an unknown kind, and PlatformError where an
    engine that was asked for by name cannot be had.
    """
    candidates = _candidates(kind)
    notes: list[str] = []
    with _probe_file(Path(directory)) as file:
        name, facts = _first_that_works(candidates, file, notes)
        return Probe(
            engine=name,
            direct=file.direct and name != "buffered",
            registers_files=facts.registered_files,
            registers_buffers=facts.registered_buffers,
            notes=(*notes, *_notes_on(directory, file, name)),
        )


def _candidates(kind: str) -> tuple[str, ...]:
    if kind not in KINDS:
        raise ConfigError(f"I/O engine {kind!r} is unknown.", remedy=f"Give one of {', '.join(KINDS)}.")
    return tuple(_OPENERS) if kind == "auto" else (kind,)


def _notes_on(directory: Path, file: DirectFile, engine: str) -> Iterator[str]:
    """Say what about the directory is not as wanted, each with its remedy."""
    if file.in_memory:
        yield (
            f"{directory} is memory ({memory_filesystem(file.path)}), not a disk: what is stored there takes RAM; "
            "give a directory on an NVMe disk."
        )
        return
    if (network := network_filesystem(file.path)) is not None:
        yield f"{directory} is a network mount ({network}): it is as fast as the network; give a directory on a local disk."
    if engine == "buffered":
        yield (
            f'{directory} is used through the page cache, as the engine "buffered" does, which costs speed; '
            'the engine "auto" takes a faster one where there is one.'
        )
    elif not file.direct:
        yield (
            f"{directory} refuses O_DIRECT: reads and writes go through the page cache, which costs speed; "
            "give a directory on a local ext4 or XFS file system."
        )


def _first_that_works(candidates: tuple[str, ...], file: DirectFile, notes: list[str]) -> tuple[str, EngineFacts]:
    """Return the first engine whose round trip works, and what it registered; why not those before it goes to the notes.

    Where the disk is at fault they all fail in the same way, and the last one's error is raised.
    """
    for name, then in itertools.pairwise(candidates):
        try:
            return name, _round_trip(_OPENERS[name](queue_depth=4, block_bytes=PAGE_BYTES), file)
        except PlatformError as error:
            notes.append(f"{error} {_INSTEAD[then]}")
        except StorageError as error:
            notes.append(f"{_SUBJECTS[name]} cannot be used in {file.path.parent}: {error} {_INSTEAD[then]}")
    last = candidates[-1]
    return last, _round_trip(_OPENERS[last](queue_depth=4, block_bytes=PAGE_BYTES), file)


def _round_trip(engine: Engine, file: DirectFile) -> EngineFacts:
    """Write a pattern, read it back and compare, registered where that works, as a run does it. Raises StorageError."""
    pattern = os.urandom(_PROBE_BYTES)
    with mmap.mmap(-1, _PROBE_BYTES) as memory:
        try:
            address = address_of(memory)
            engine.register(files=[file], memory=[MemoryRange(address, _PROBE_BYTES)])
            facts = engine.facts
            memory[:] = pattern
            engine.submit([Request(Op.WRITE, file, 0, address, _PROBE_BYTES, memory)])[0].wait()
            memory[:] = bytes(_PROBE_BYTES)
            engine.submit([Request(Op.READ, file, 0, address, _PROBE_BYTES, memory)])[0].wait()
        finally:
            engine.close()
        returned = memory[:]
    if returned != pattern:
        raise StorageError(
            f"{file.path.parent} returned other bytes than were written to it.",
            remedy="Check the file system and the disk; give another directory.",
            errno=errno.EIO,
        )
    return facts


@contextmanager
def _probe_file(directory: Path) -> Iterator[DirectFile]:
    """Make a temporary file in the directory, and remove it again."""
    try:
        mode = directory.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise StorageError(
                f"{directory} is not a directory but {_kind_of_file(mode)}.",
                remedy="Give a directory on the file system of an NVMe disk (a device by its mount point).",
                errno=errno.ENOTDIR,
            )
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=directory)
    except OSError as error:
        if isinstance(error, InfinityError):
            raise
        raise _unusable(directory, error) from error
    path = Path(name)
    try:
        os.close(descriptor)
        file = open_direct(path, create=False)
        try:
            yield file
        finally:
            file.close()
    finally:
        path.unlink()


def _kind_of_file(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "a file"
    return "a device" if stat.S_ISBLK(mode) or stat.S_ISCHR(mode) else "something else"


def _unusable(directory: Path, error: OSError) -> StorageError:
    """Return the error for a directory that takes no file, with the user and the mode that explain it."""
    number = error.errno or errno.EIO
    failure = storage_error("create a file in", directory, -number)
    if number in (errno.EACCES, errno.EPERM):
        owner = directory.stat() if directory.exists() else None
        mode = f", {directory} has mode {stat.filemode(owner.st_mode)} and owner {owner.st_uid}" if owner else ""
        return StorageError(f"{failure.message} This user is {os.geteuid()}{mode}.", remedy=failure.remedy, errno=number)
    return failure
