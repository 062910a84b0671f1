"""Runs `bench nvme`: every job on every engine, each directory alone and all together, beside fio where that is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import Protocol

from infinity.bench.fio import LIBAIO, URING, Fio
from infinity.bench.nvme_bed import open_for, open_targets
from infinity.bench.nvme_jobs import NUM_REPETITIONS, WRITING_JOB, Job, NvmeSettings, Traffic
from infinity.bench.nvme_measure import Timing, measure, run_steadily, side_by_side
from infinity.bench.nvme_places import Places
from infinity.bench.nvme_results import LongRun, Report, Result, Row, cache_notes, fio_row, result_of, slowdown_note
from infinity.bench.nvme_stream import Target
from infinity.bench.page_cache import resident_share

# A plain run takes less than a minute, so writing the file may take only a part of it.
_WRITE_SECONDS = 12.0
_NUM_INTERVALS = 12
_NUM_FIO_RUNS = 3  # each begins and ends anew, so they are longer than the windows of a steady run
_WARM_UP_SHARE, _LATENCY_SHARE = 0.1, 0.2


class Observer(Protocol):
    """Is told what happens; it does nothing between two calls, so that it takes no time from what is measured."""

    def phase(self, text: str) -> None:
        """Something begins."""

    def row(self, row: Row) -> None:
        """A row was measured."""


class NvmeBench:
    """The measurements on files that are open; not thread-safe. After an exception it has no results."""

    def __init__(
        self, settings: NvmeSettings, places: Places, targets: Sequence[Target], fio: Fio | None, observer: Observer
    ) -> None:
        self._settings = settings
        self._direct = places.direct
        self._targets = targets
        self._fio = fio
        self._observer = observer
        self.written_bytes = 0
        self.resident_share = 0.0  # the most that was seen of a file in the page cache just before it was read
        self.notes: dict[str, None] = {}  # in order, each once

    def result(self, engine: str, job: Job, targets: Sequence[Target], where: str) -> Result:
        """Measure a job on some of the targets at once; `where` ends the line that the observer is told."""
        self._observer.phase(f"{engine}, {job}{where}")
        seconds = self._settings.seconds
        timing = Timing(seconds * _WARM_UP_SHARE, seconds / NUM_REPETITIONS, NUM_REPETITIONS, seconds * _LATENCY_SHARE)
        if job.traffic is not Traffic.WRITE and not self._direct[engine]:
            self._look_at_page_cache(targets)
        with open_for(targets, engine, job) as (engines, facts):
            measured = measure(list(zip(engines, targets, strict=True)), job, timing)
        self.notes |= dict.fromkeys(facts.notes)
        self._count_written(job, measured.num_bytes)
        result = result_of(job, engine, facts, measured)
        self._observer.row(result.row)
        return result

    def beside(self, engine: str, job: Job) -> list[Row]:
        """Run the same job with fio on the first target's file, with the engine of fio that is nearest."""
        if self._fio is None:
            return []
        fio_engine = URING if engine == "uring" else LIBAIO
        self._observer.phase(f"fio {fio_engine.name}, {job}")
        seconds = self._settings.seconds / _NUM_FIO_RUNS
        runs = [self._fio.run(job, fio_engine, seconds) for _ in range(_NUM_FIO_RUNS)]
        self._count_written(job, sum(run.num_bytes for run in runs))
        row = fio_row(job, fio_engine, runs)
        self._observer.row(row)
        return [row]

    def long_run(self, engine: str) -> LongRun:
        """Write on the first target without a pause."""
        seconds = self._settings.long_run_seconds
        self._observer.phase(f"{engine}, {WRITING_JOB}, without a pause for {seconds:g} s")
        timing = Timing(0.0, seconds / _NUM_INTERVALS, _NUM_INTERVALS, 0.0)
        target = self._targets[0]
        with open_for([target], engine, WRITING_JOB) as (engines, _):
            (run,) = side_by_side(
                [(engines[0], target)], lambda engine, target, stop: run_steadily(engine, target, WRITING_JOB, timing, stop)
            )
        self.written_bytes += run.num_bytes
        return LongRun(
            engine, WRITING_JOB.block_bytes, WRITING_JOB.queue_depth, timing.window_seconds, run.rates, run.num_bytes
        )

    def _count_written(self, job: Job, moved_bytes: int) -> None:
        self.written_bytes += {Traffic.READ: 0, Traffic.WRITE: moved_bytes, Traffic.MIXED: moved_bytes // 2}[job.traffic]

    def _look_at_page_cache(self, targets: Sequence[Target]) -> None:
        for target in targets:
            if not target.file.in_memory:
                self.resident_share = max(self.resident_share, resident_share(target.file.fd))


def run(settings: NvmeSettings, jobs: Sequence[Job], places: Places, fio_program: str | None, observer: Observer) -> Report:
    """Measure everything and return the report; the files are closed when this returns or raises.

    Raises StorageError, SwapSpaceError, PlatformError, OverBudget: a report is always whole.
    """
    with ExitStack() as resources:
        limit = None if places.size_was_given else _WRITE_SECONDS
        targets, written_bytes = open_targets(places, jobs, write_seconds=limit, tell=observer.phase, resources=resources)
        fio = Fio(fio_program, targets[0].file.path, targets[0].file_bytes) if fio_program else None
        bench = NvmeBench(settings, places, targets, fio, observer)
        bench.written_bytes = written_bytes
        results: list[Result] = []
        against: list[Row] = []
        alone: dict[str, list[Result]] = {}
        cells = list(product(places.engines, jobs))
        for number, (engine, job) in enumerate(cells, start=1):
            count = f" ({number} of {len(cells)})"
            if len(targets) > 1:
                for facts, target in zip(places.directories, targets, strict=True):
                    result = bench.result(engine, job, [target], f" in {facts.path}{count}")
                    alone.setdefault(str(facts.path), []).append(result)
            results.append(bench.result(engine, job, targets, f" in all{count}" if len(targets) > 1 else count))
            against += bench.beside(engine, job)
        long_run = bench.long_run(places.engines[0]) if settings.long_run_seconds and _writes(jobs) else None
        rows = [result.row for result in results]
        notes = [*places.notes, *bench.notes, *cache_notes(rows, bench.resident_share, len(targets))]
        if fio is not None and len(targets) > 1:
            notes.append(f"fio ran in {places.directories[0].path} alone: its lines stand beside those of that directory.")
        if long_run is not None:
            notes.append(slowdown_note(long_run))
        return Report(
            places, targets[0].file_bytes, tuple(results), tuple(against),
            {path: tuple(found) for path, found in alone.items()}, long_run, bench.written_bytes, tuple(notes),
        )  # fmt: skip


def _writes(jobs: Sequence[Job]) -> bool:
    return any(job.traffic is not Traffic.READ for job in jobs)
