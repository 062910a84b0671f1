"""The table of `bench nvme`, while it grows on a terminal and at the end."""

from __future__ import annotations

from io import StringIO

from bench_fakes import some_row
from rich.console import Console
from rich.live import Live
from rich.text import Text

from infinity.cli.bench_display import LiveObserver, results_table

ROWS = [some_row("read", "uring", 1 << 20, 32, 2.5e9), some_row("write", "fio:io_uring", 4096, 64, 0.125e9)]


def shown(width: int = 160) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, force_terminal=True, width=width, color_system=None), out


def test_rates_are_in_gb_and_registration_is_said() -> None:
    """Median, least and most in 10**9 bytes per second; a row that registered nothing says so."""
    console, out = shown()
    console.print(results_table(ROWS, ()))
    read, write = out.getvalue().splitlines()[1:]
    assert read.split()[:6] == ["read", "uring", "1.00", "MiB", "32", "2.500"]
    assert "2.250" in read
    assert "2.750" in read
    assert read.split()[-1] == "none"
    assert "fio:io_uring" in write
    assert "0.125" in write


def test_the_live_table_grows_without_a_thread_of_its_own() -> None:
    """Each row appears when it was measured, what is being done stands below, and nothing is drawn in between."""
    console, out = shown()
    with Live(Text(), console=console, auto_refresh=False, transient=True) as live:
        observer = LiveObserver(live)
        observer.phase("uring, read")
        assert "uring, read ..." in out.getvalue()
        assert "2.500" not in out.getvalue()
        observer.row(ROWS[0])
        assert "2.500" in out.getvalue()
        assert live._refresh_thread is None
