"""Runs the search for the best setting on files that are made for it."""

from __future__ import annotations

import time
from contextlib import ExitStack

from infinity.bench.nvme_bed import open_targets
from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic
from infinity.bench.nvme_places import Places
from infinity.bench.nvme_results import Report, Result, cache_notes
from infinity.bench.nvme_run import NvmeBench, Observer
from infinity.bench.nvme_tune import Setting, Trial, Tuned, candidate_jobs, search

_WRITE_SECONDS = 5.0


def tune(settings: NvmeSettings, places: Places, end: float, observer: Observer) -> tuple[Tuned, Report]:
    """Find the best setting before `time.perf_counter()` reaches `end`; return it, and every trial as a report.

    The trials run in all directories at once. Raises StorageError, SwapSpaceError, PlatformError, OverBudget.
    """
    with ExitStack() as resources:
        targets, written_bytes = open_targets(
            places, candidate_jobs(), write_seconds=_WRITE_SECONDS, tell=observer.phase, resources=resources
        )
        bench = NvmeBench(settings, places, targets, None, observer)
        bench.written_bytes = written_bytes
        results: list[Result] = []

        def try_out(setting: Setting) -> Trial:
            rates = []
            for traffic in (Traffic.READ, Traffic.WRITE):
                job = Job(traffic, setting.block_bytes, setting.queue_depth)
                results.append(bench.result(setting.engine, job, targets, ""))
                rates.append(results[-1].row.bytes_per_second)
            return Trial(setting, *rates)

        tuned = search(places.engines, try_out, lambda: end - time.perf_counter())
        rows = [result.row for result in results]
        notes = [*places.notes, *bench.notes, *cache_notes(rows, bench.resident_share, len(targets))]
        if tuned.cut_short:
            notes.append("Time ran out before every setting was tried; the best of those that were is given.")
        return tuned, Report(places, targets[0].file_bytes, tuple(results), (), {}, None, bench.written_bytes, tuple(notes))
