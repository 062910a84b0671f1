"""The `infinity` command. Loads no torch until a command needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from infinity import __version__
from infinity.cli.bench import app as bench
from infinity.cli.clean import clean
from infinity.cli.doctor import doctor
from infinity.cli.failures import failures_explained
from infinity.cli.leaving import failed_ranks_leave_at_once
from infinity.cli.plan import plan
from infinity.cli.train import train

app = typer.Typer(
    name="infinity",
    help="Train models whose state is far larger than GPU memory and RAM, on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(name="train")(train)
app.command(name="plan")(plan)
app.command(name="clean")(clean)
app.command(name="doctor")(doctor)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"infinity {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line and exit with its code."""
    with failed_ranks_leave_at_once(), failures_explained():
        app()
