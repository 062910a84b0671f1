"""What a run looks like on a terminal and in a file."""

from __future__ import annotations

import io

from rich.console import Console

from infinity.cli.display import open_display, step_line
from infinity.train.reporter import Progress, Row, StepRecord

RECORD = StepRecord(
    step=7, loss=2.5, grad_norm=0.75, lr=1e-3, tokens=2048, step_seconds=0.5, tokens_per_second=4096.0,
    nvme_read_bytes=1 << 30, nvme_write_bytes=1 << 29, unit_loads=20, cpu_memory_peak_bytes=0, rss_peak_bytes=0,
    skipped=False, loss_scale=1.0, all_gather_bytes=0, reduce_scatter_bytes=0, broadcast_bytes=0,
)  # fmt: skip
PROGRESS = Progress(num_steps=100, seconds_left=3723.0, cpu_memory_bytes=1 << 30, cpu_memory_budget_bytes=2 << 30)


def test_a_step_line_says_everything_that_was_promised() -> None:
    """Step, loss, norm, lr, tokens/s, read and write rate, memory of budget and time left are in one line."""
    line = step_line(RECORD, PROGRESS)
    for part in ("step 7/100", "loss 2.5000", "norm 0.750", "lr 1.00e-03", "4096 tokens/s", "read 2.00 GiB/s",
                 "write 1.00 GiB/s", "memory 1.00 GiB of 2.00 GiB", "1:02:03 left"):  # fmt: skip
        assert part in line
    assert "\n" not in line


def test_a_file_gets_plain_lines() -> None:
    """Where the output is no terminal there are no control characters, and brackets are not taken for markup."""
    stream = io.StringIO()
    with open_display(Console(file=stream, soft_wrap=True)) as display:
        display.note("a [bold]note[/bold]")
        display.plan([Row("weights", "[cpu] 1.00 GiB")])
        display.step(RECORD, PROGRESS)
    assert "\x1b" not in stream.getvalue()
    assert "a [bold]note[/bold]\n" in stream.getvalue()
    assert "[cpu] 1.00 GiB" in stream.getvalue()
    assert step_line(RECORD, PROGRESS) + "\n" in stream.getvalue()


def test_a_terminal_gets_one_live_line_below_the_notes() -> None:
    """On a terminal the step line is redrawn in place and taken down at the end; notes stay."""
    stream = io.StringIO()
    with open_display(Console(file=stream, force_terminal=True, width=200)) as display:
        display.step(RECORD, PROGRESS)
        display.note("a note")
    assert "a note" in stream.getvalue()
    assert "\x1b[2K" in stream.getvalue()
