"""How fast directories read and write, measured in a moment before a run, and the shares of the bytes that follow."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.engine import Engine
from infinity.aio.failures import storage_error
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import free_bytes
from infinity.aio.request import Op, Request, address_of
from infinity.byte_sizes import MIB
from infinity.errors import SwapSpaceError
from infinity.handles import wait_until_over

_BUFFER_BYTES = 8 * MIB  # of noise, written again and again: no file system compresses across that much
_FILE_BYTES = 64 * MIB
_NUM_BURSTS = 3
# A slow disk gets a smaller file and fewer bursts.
_FIRST_WRITE_SECONDS, _BURSTS_SECONDS = 0.15, 0.5
# Two measurements of one disk differ by so much, so this much says nothing about two disks.
_NOISE = 0.15


@dataclass(frozen=True, slots=True)
class Rate:
    """What a device does one direction at a time: medians over bursts."""

    read_bytes_per_second: float
    write_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """The rate of bytes of which as many are read as written, which is what optimizer state asks of a disk."""
        return 2 / (1 / self.read_bytes_per_second + 1 / self.write_bytes_per_second)


@dataclass(frozen=True, slots=True)
class DirectoryRate:
    """A directory, its device's rate (None where there was no room to measure it), and its weight beside the others."""

    directory: Path
    rate: Rate | None
    weight: float


def measure_directories(directories: Sequence[Path], engine: Engine) -> tuple[DirectoryRate, ...]:
    """Measure each device with the engine of the run, and weigh the directories.

    Directories on one device share its rate in equal parts: it is measured once. Takes well under a second a device.
    Raises StorageError for a directory that cannot be read or written.
    """
    devices = [os.stat(directory).st_dev for directory in directories]
    measured: dict[int, Rate | None] = {}
    for directory, device in zip(directories, devices, strict=True):
        if device not in measured:
            measured[device] = measure_rate(directory, engine)
    rates = [measured[device] for device in devices]
    weights = directory_weights([rate.bytes_per_second if rate else None for rate in rates], devices)
    return tuple(DirectoryRate(*row) for row in zip(directories, rates, weights, strict=True))


def measure_rate(directory: Path, engine: Engine) -> Rate | None:
    """Write a file of noise once, then time bursts of writes and reads over it; None where there is no room for one.

    The file has no name while it is written, so that nothing of it is left however the process ends. Raises StorageError.
    """
    memory = mmap.mmap(-1, _BUFFER_BYTES)  # never closed by hand: the engine keeps it for as long as it needs it
    memory[:] = os.urandom(_BUFFER_BYTES)
    room = (free_bytes(directory) or 0) // 4  # so small a part of what is free that nobody misses it
    try:
        with _nameless_file(directory) as file:
            num_bytes = _write_once(engine, file, memory, min(_FILE_BYTES, room))
            return _timed_bursts(engine, file, memory, num_bytes) if num_bytes else None
    except SwapSpaceError:
        return None


def directory_weights(rates: Sequence[float | None], devices: Sequence[int]) -> tuple[float, ...]:
    """Return a weight for each directory from its device's rate.

    Rates that noise alone may explain count as equal, an unknown rate as the slowest one, and the directories on one device
    have equal parts of it.
    """
    slowest = min((rate for rate in rates if rate is not None), default=1.0)
    levelled = _levelled([slowest if rate is None else rate for rate in rates])
    return tuple(rate / devices.count(device) for rate, device in zip(levelled, devices, strict=True))


def _levelled(rates: Sequence[float]) -> list[float]:
    """Give all rates that are within the noise of the fastest their mean, then those within that of the fastest left."""
    result = list(rates)
    left = sorted(range(len(rates)), key=lambda index: -rates[index])
    while left:
        group = [index for index in left if rates[index] >= rates[left[0]] * (1 - _NOISE)]
        for index in group:
            result[index] = statistics.fmean(rates[member] for member in group)
        left = left[len(group) :]
    return result


@contextlib.contextmanager
def _nameless_file(directory: Path) -> Iterator[DirectFile]:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".infinity-rate-", dir=directory)
    except OSError as error:
        raise storage_error("create a file in", directory, -(error.errno or errno.EIO)) from error
    try:
        os.close(descriptor)
        file = open_direct(name, create=False)
    finally:
        os.unlink(name)
    try:
        yield file
    finally:
        file.close()


def _write_once(engine: Engine, file: DirectFile, memory: mmap.mmap, most_bytes: int) -> int:
    """Write up to `most_bytes`, fewer on a slow disk; return how many: whole buffers."""
    written, begin = 0, time.perf_counter()
    while written + _BUFFER_BYTES <= most_bytes and time.perf_counter() - begin < _FIRST_WRITE_SECONDS:
        _move(engine, [_request(Op.WRITE, file, written, memory)])
        written += _BUFFER_BYTES
    file.sync()
    return written


def _timed_bursts(engine: Engine, file: DirectFile, memory: mmap.mmap, num_bytes: int) -> Rate:
    seconds: dict[Op, list[float]] = {Op.WRITE: [], Op.READ: []}
    begin = time.perf_counter()
    while len(seconds[Op.READ]) < _NUM_BURSTS:
        for op, durations in seconds.items():
            started = time.perf_counter()
            _move(engine, [_request(op, file, offset, memory) for offset in range(0, num_bytes, _BUFFER_BYTES)])
            if not file.direct:
                file.sync()  # otherwise it would be the page cache that is measured
            durations.append(time.perf_counter() - started)
        if time.perf_counter() - begin > _BURSTS_SECONDS:
            break
    return Rate(num_bytes / statistics.median(seconds[Op.READ]), num_bytes / statistics.median(seconds[Op.WRITE]))


def _request(op: Op, file: DirectFile, offset: int, memory: mmap.mmap) -> Request:
    return Request(op, file, offset, address_of(memory), _BUFFER_BYTES, memory)


def _move(engine: Engine, requests: Sequence[Request]) -> None:
    wait_until_over(engine.submit(requests))  # the file is closed next, and its number is soon another's
