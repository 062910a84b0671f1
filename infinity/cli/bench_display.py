"""What a benchmark of the disk looks like: a table that grows on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from infinity.bench.nvme_results import Detail, Report, Row
from infinity.bench.nvme_run import Observer
from infinity.byte_sizes import format_bytes
from infinity.cli.console import open_console

_PLAIN_COLUMNS = 140  # of a table that goes to a file or another program


@contextmanager
def open_observer() -> Iterator[Observer]:
    """Yield the observer that suits the output."""
    console = _console()
    if not console.is_terminal:
        yield PlainObserver(console)
        return
    # Without its own thread, which would take CPU time from what is measured.
    with Live(Text(), console=console, auto_refresh=False, transient=True) as live:
        yield LiveObserver(live)


class PlainObserver:
    """A line for everything that begins."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def phase(self, text: str) -> None:
        self._console.print(Text(f"{text} ..."))

    def row(self, row: Row) -> None:
        """Rows are in the table at the end."""


class LiveObserver:
    """The table so far, and below it what is being done."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rows: list[Row] = []
        self._phase = ""

    def phase(self, text: str) -> None:
        self._phase = text
        self._show()

    def row(self, row: Row) -> None:
        self._rows.append(row)
        self._show()

    def _show(self) -> None:
        self._live.update(Group(results_table(self._rows, ()), Text(f"{self._phase} ...")), refresh=True)


def show_report(report: Report) -> None:
    """Print the tables, and what must be said about them."""
    console = _console()
    for path, results in report.alone.items():
        console.print(Text(f"{path} alone", style="bold"))
        console.print(results_table([result.row for result in results], [result.detail for result in results]))
    if report.alone:
        console.print(Text("all together", style="bold"))
    console.print(results_table([result.row for result in report.results], [result.detail for result in report.results]))
    if report.against:
        console.print(results_table(report.against, ()))
    if report.long_run:
        rates = "  ".join(f"{rate / 1e9:.2f}" for rate in report.long_run.rates)
        console.print(Text(f"writing without a pause, GB/s every {report.long_run.interval_seconds:.2g} s:  {rates}"))
    engines = [engine for engine, is_direct in report.places.direct.items() if is_direct]
    direct = f"O_DIRECT with {', '.join(engines)}" if engines else "no O_DIRECT"
    for facts in report.places.directories:
        console.print(Text(f"{facts.path}: {facts.file_system}{'' if report.alone else f', {direct}'}"))
    if report.alone:
        console.print(Text(f"in all of them: {direct}" if engines else "no engine has O_DIRECT in all of them"))
    console.print(Text(f"file {format_bytes(report.file_bytes)}, written in all {format_bytes(report.written_bytes)}"))
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)


def show_tuned(section: Mapping[str, object], path: Path) -> None:
    """Print the configuration that was found, and how it is used."""
    console = _console()
    console.print(Text(json.dumps(section, indent=2)))
    console.print(Text(f"This is in {path}: infinity train --config {path}"))


def results_table(rows: Sequence[Row], details: Sequence[Detail]) -> Table:
    """Return the table of some rows; GB is 10**9 bytes, rates are medians and exclude fsync."""
    table = Table(box=None, pad_edge=False)
    for name in ("op", "engine", "access"):
        table.add_column(name)
    for name in ("block", "depth", "GB/s", "least", "most", "IOPS", "p50 us", "p99 us", "max us", "CPU s/GB", "fsync s"):
        table.add_column(name, justify="right")
    table.add_column("registered")
    for index, row in enumerate(rows):
        detail = details[index] if details else None
        table.add_row(
            row.op, row.engine, detail.access if detail else "", format_bytes(row.block_bytes), str(row.queue_depth),
            f"{row.bytes_per_second / 1e9:.3f}", f"{row.bytes_per_second_min / 1e9:.3f}",
            f"{row.bytes_per_second_max / 1e9:.3f}", f"{row.iops:.0f}", f"{row.latency_p50_us:.0f}",
            f"{row.latency_p99_us:.0f}", f"{row.latency_max_us:.0f}", f"{row.cpu_seconds_per_gb:.3f}",
            f"{detail.fsync_seconds:.3f}" if detail and detail.fsync_seconds is not None else "",
            _registered(row),
        )  # fmt: skip
    return table


def _registered(row: Row) -> str:
    names = [name for name, holds in (("buffers", row.registered_buffers), ("files", row.registered_files)) if holds]
    return ", ".join(names) or "none"


def _console() -> Console:
    console = open_console(soft_wrap=False)
    return console if console.is_terminal else open_console(soft_wrap=False, width=_PLAIN_COLUMNS)
