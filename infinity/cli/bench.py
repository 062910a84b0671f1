"""`infinity bench`: one sub-command for each benchmark."""

from __future__ import annotations

import typer

from infinity.cli.bench_adam import adam
from infinity.cli.bench_nvme import nvme

app = typer.Typer(help="Measure what the disk and the processor give to training.", no_args_is_help=True)
app.command(name="nvme")(nvme)
app.command(name="adam")(adam)


@app.callback()
def root() -> None:
    """Keep the sub-commands' names, however few there are."""
