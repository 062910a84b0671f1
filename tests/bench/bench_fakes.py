"""Engines and disks that the tests of the benchmarks run against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.aio.engine import EngineFacts, MemoryRange
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request
from infinity.bench.nvme_results import Row
from infinity.bench.nvme_tune import Setting, Trial
from infinity.errors import StorageError
from infinity.handles import Handle


class RecordingEngine:
    """Moves nothing: keeps what it was given; every request ends when somebody waits for it.

    The request with number n, counted from 1, says that it took n microseconds.
    """

    name = "uring"

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.batches: list[list[Request]] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._fails_at = fails_at
        self._num_waited = 0

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(registered_files=True, registered_buffers=True, notes=())

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.batches for request in batch]

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """There is nothing to register."""

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """There is nothing to take back."""

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        self.batches.append(list(requests))
        self._in_flight += len(requests)
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        first = len(self.requests) - len(requests)
        return [_Recorded(self, first + number) for number in range(len(requests))]

    def close(self) -> None:
        """There is nothing to end."""

    def end(self) -> None:
        """One more request was waited for."""
        self._in_flight -= 1
        self._num_waited += 1
        if self._num_waited == self._fails_at:
            raise StorageError("the disk is gone", errno=5)


class _Recorded:
    def __init__(self, engine: RecordingEngine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._is_over = False

    @property
    def latency_nanoseconds(self) -> int | None:
        return 1000 * (self._number + 1) if self._is_over else None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._engine.end()


class FakeDisk:
    """Rates as a function of the setting, and a clock that every trial moves on."""

    def __init__(self, *, seconds_per_trial: float = 1.0, best: Setting, gain: float = 1.5) -> None:
        self.now = 0.0
        self.tried: list[Setting] = []
        self._seconds_per_trial = seconds_per_trial
        self._best = best
        self._gain = gain

    def try_out(self, setting: Setting) -> Trial:
        self.now += self._seconds_per_trial
        self.tried.append(setting)
        same = (
            (setting.engine == self._best.engine)
            + (setting.block_bytes == self._best.block_bytes)
            + (setting.queue_depth == self._best.queue_depth)
        )
        rate = 1e9 * self._gain ** (same / 3)
        return Trial(setting, rate, rate)


class Silent:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: list[Row] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def row(self, row: Row) -> None:
        self.rows.append(row)


def some_row(op: str, engine: str, block_bytes: int, queue_depth: int, rate: float) -> Row:
    """Return a row whose rate matters and nothing else does."""
    return Row(op, engine, block_bytes, queue_depth, rate, rate * 0.9, rate * 1.1, 1.0, 1.0, 2.0, 3.0, 0.01, False, False)


def writes(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.op is Op.WRITE]


def files_below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))
