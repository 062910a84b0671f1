"""How fast is a directory: measured without a trace, turned into weights that noise does not sway."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.aio import rates
from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.rates import Rate, directory_weights, measure_directories, measure_rate
from infinity.aio.request import Op, Request
from infinity.errors import StorageError
from infinity.handles import Handle

BUFFER = 1 << 16


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with files of four buffers of 64 KiB."""
    monkeypatch.setattr(rates, "_BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(rates, "_FILE_BYTES", 4 * BUFFER)


class Counting:
    """Passes requests on and remembers them; `interrupts` at the wait of that request, counted from 0."""

    name = "counting"

    def __init__(self, engine: Engine, interrupts: int | None = None) -> None:
        self._engine = engine
        self._interrupts = interrupts
        self.requests: list[Request] = []
        self.handles: list[Handle[None]] = []

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        first = len(self.requests)
        self.requests += requests
        handles = self._engine.submit(requests)
        self.handles += handles
        return [
            _Interrupted(handle) if first + number == self._interrupts else handle for number, handle in enumerate(handles)
        ]


class _Interrupted:
    """The user presses Ctrl-C while somebody waits."""

    def __init__(self, handle: Handle[None]) -> None:
        self._handle = handle
        self._pressed = False

    def wait(self) -> None:
        if not self._pressed:
            self._pressed = True
            raise KeyboardInterrupt
        self._handle.wait()

    def done(self) -> bool:
        return self._handle.done()


def test_a_directory_is_written_once_then_written_and_read(tmp_path: Path, engine: Engine) -> None:
    """Every byte that is timed was written before, in three bursts each way; nothing is left in the directory."""
    counting = Counting(engine)
    rate = measure_rate(tmp_path, counting)  # type: ignore[arg-type]
    assert rate is not None
    assert min(rate.read_bytes_per_second, rate.write_bytes_per_second) > 0
    assert rate.bytes_per_second == pytest.approx(
        2 * rate.read_bytes_per_second * rate.write_bytes_per_second
        / (rate.read_bytes_per_second + rate.write_bytes_per_second)
    )  # fmt: skip
    ops = [request.op for request in counting.requests]
    assert ops == [Op.WRITE] * 4 + ([Op.WRITE] * 4 + [Op.READ] * 4) * 3
    assert {request.offset for request in counting.requests} == {number * BUFFER for number in range(4)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path, engine: Engine, at: int) -> None:
    """Ctrl-C while a burst runs: no file is left, and no request is in flight when its file is closed."""
    counting = Counting(engine, interrupts=at)
    with pytest.raises(KeyboardInterrupt):
        measure_rate(tmp_path, counting)  # type: ignore[arg-type]
    assert all(handle.done() for handle in counting.handles)
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in os.listdir("/proc/self/fd") if ".infinity-rate" in _target(name)]


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_a_slow_disk_gets_a_smaller_file(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a second passes between any two looks at the clock, one buffer and one burst each way is all."""
    ticks = itertools.count()
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(rates, "_FIRST_WRITE_SECONDS", 1.5)
    counting = Counting(engine)
    assert measure_rate(tmp_path, counting) is not None  # type: ignore[arg-type]
    assert [request.op for request in counting.requests] == [Op.WRITE, Op.WRITE, Op.READ]


def test_a_full_directory_has_no_rate(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room to measure, or it runs out, that is no error: free space bounds the directory's share."""
    full = FaultyEngine(engine, [Fault(FaultKind.ERROR, lambda request: request.offset > 0, errno=errno.ENOSPC)])
    assert measure_rate(tmp_path, full) is None
    monkeypatch.setattr(rates, "free_bytes", lambda directory: BUFFER)
    assert measure_rate(tmp_path, engine) is None
    assert list(tmp_path.iterdir()) == []


def test_a_broken_directory_is_an_error_that_names_it(tmp_path: Path, engine: Engine) -> None:
    """A disk that cannot be read ends the run before it begins."""
    broken = FaultyEngine(engine, [Fault(FaultKind.ERROR, lambda request: request.op is Op.READ)])
    with pytest.raises(StorageError, match=f"read of .* of {tmp_path}/.infinity-rate-.* failed: Input/output error"):
        measure_rate(tmp_path, broken)
    assert list(tmp_path.iterdir()) == []


def test_directories_on_one_device_are_measured_once(tmp_path: Path, engine: Engine) -> None:
    """Two directories on one disk share its rate in equal parts."""
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    counting = Counting(engine)
    first, second = measure_directories(directories, counting)  # type: ignore[arg-type]
    assert len(counting.requests) == 4 + 3 * 8
    assert first.rate == second.rate
    assert first.rate is not None
    assert first.weight == second.weight == first.rate.bytes_per_second / 2
    assert (first.directory, second.directory) == tuple(directories)


def test_two_devices_are_weighed_by_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of reads and writes together decides."""
    directories = [Path("/"), tmp_path]
    devices = {Path("/"): 1, tmp_path: 2}
    measured = {Path("/"): Rate(3e9, 3e9), tmp_path: Rate(1e9, 1e9)}
    monkeypatch.setattr(rates, "os", SimpleNamespace(stat=lambda path: SimpleNamespace(st_dev=devices[path])))
    monkeypatch.setattr(rates, "measure_rate", lambda directory, engine: measured[directory])
    first, second = measure_directories(directories, None)  # type: ignore[arg-type]
    assert first.weight == pytest.approx(3 * second.weight)


@pytest.mark.parametrize(("measured", "devices", "expected"), [
    ([1000, 1100], [1, 2], [1050, 1050]),  # noise
    ([1000, 1300], [1, 2], [1000, 1300]),
    ([900, 3000, 1000, 2900], [1, 2, 3, 4], [950, 2950, 950, 2950]),  # two sorts of disks
    ([1000, 1000, 1000], [1, 1, 2], [500, 500, 1000]),  # two directories share a disk
    ([3000, None], [1, 2], [3000, 3000]),  # nothing known: as slow as the slowest
    ([None, None], [1, 1], [0.5, 0.5]),
    ([500], [1], [500]),
])  # fmt: skip
def test_weights_from_rates(measured: list[float | None], devices: list[int], expected: list[float]) -> None:
    """Differences within 15 % count as none; directories on one device have parts of its rate."""
    assert list(directory_weights(measured, devices)) == pytest.approx(expected)


@given(st.lists(st.floats(1e6, 1e11), min_size=1, max_size=6))
def test_levelling_keeps_the_order_and_the_sum(measured: list[float]) -> None:
    """No slower disk ever gets more than a faster one, and what they do together stays."""
    weights = directory_weights(measured, list(range(len(measured))))
    pairs = sorted(zip(measured, weights, strict=True))
    assert all(before[1] <= after[1] * (1 + 1e-9) for before, after in itertools.pairwise(pairs))
    assert sum(weights) == pytest.approx(sum(measured))
    assert all(weight > 0 for weight in weights)
