"""What a run looks like: one live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from infinity.byte_sizes import format_bytes
from infinity.cli.console import open_console
from infinity.comm.launched import Ranks
from infinity.train.reporter import Progress, Reporter, Row, StepRecord
from infinity.train.voice import Silent

_REFRESH_PER_SECOND = 4


def display_of(ranks: Ranks) -> AbstractContextManager[Reporter]:
    """Return the display of a rank: rank 0 shows what all have to say."""
    return open_display() if ranks.speaks else nullcontext(Silent())


@contextmanager
def open_display(console: Console | None = None) -> Iterator[Reporter]:
    """Yield the display that suits the output; a live line is taken down at the end, however that comes."""
    console = console or open_console()
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    with Live(Text(), console=console, refresh_per_second=_REFRESH_PER_SECOND, transient=True) as live:
        yield LiveDisplay(PlainDisplay(console), live)


class PlainDisplay:
    """A line for everything that is said."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def plan(self, rows: Sequence[Row]) -> None:
        self._console.print(_listing("Plan", rows))

    def phase(self, text: str) -> None:
        self._console.print(Text(f"{text} ..."))

    def step(self, record: StepRecord, progress: Progress) -> None:
        self._console.print(Text(step_line(record, progress)))

    def summary(self, rows: Sequence[Row]) -> None:
        self._console.print(_listing("Summary", rows))


class LiveDisplay:
    """Steps and phases share one line at the bottom; everything else is printed above it."""

    def __init__(self, plain: PlainDisplay, live: Live) -> None:
        self._live = live
        self.note = plain.note
        self.plan = plain.plan
        self.summary = plain.summary

    def phase(self, text: str) -> None:
        self._live.update(Text(f"{text} ..."))

    def step(self, record: StepRecord, progress: Progress) -> None:
        self._live.update(Text(step_line(record, progress), no_wrap=True, overflow="ellipsis"))


def step_line(record: StepRecord, progress: Progress) -> str:
    """Return a finished step in one line."""
    memory = format_bytes(progress.cpu_memory_bytes)
    if progress.cpu_memory_budget_bytes is not None:
        memory += f" of {format_bytes(progress.cpu_memory_budget_bytes)}"
    parts = [
        f"step {record.step}/{progress.num_steps}",
        "skipped" if record.skipped else f"loss {record.loss:.4f}",
        f"norm {record.grad_norm:.3f}" if record.grad_norm is not None else "",
        f"lr {record.lr:.2e}",
        f"{record.tokens_per_second:.0f} tokens/s",
        f"read {format_bytes(record.nvme_read_bytes / record.step_seconds)}/s",
        f"write {format_bytes(record.nvme_write_bytes / record.step_seconds)}/s",
        f"memory {memory}",
        f"{timedelta(seconds=round(progress.seconds_left))} left",
    ]
    return "  ".join(part for part in parts if part)


def _listing(title: str, rows: Sequence[Row]) -> Text:
    width = max((len(row.name) for row in rows), default=0)
    return Text("\n").join([Text(title, style="bold"), *(Text(f"  {row.name:<{width}}  {row.value}") for row in rows)])
