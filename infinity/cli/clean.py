"""`infinity clean DIR`: lists the run directories in a directory and removes those of dead runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.byte_sizes import format_bytes
from infinity.cli.failures import failures_explained
from infinity.cli.options import parse_path

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory that was given to --nvme.", parser=parse_path)]
_List = Annotated[bool, typer.Option("--list", help="List only; remove nothing.")]
_Checkpoints = Annotated[bool, typer.Option("--checkpoints", help="Remove also dead runs that hold a checkpoint.")]


def clean(directory: _Directory, list_only: _List = False, checkpoints: _Checkpoints = False) -> None:
    """List the swap files of runs in DIR and remove those of dead runs; living ones and, unless asked, checkpoints stay."""
    with failures_explained():
        from infinity.store.directory import RunState, list_runs, remove_run

        runs = list_runs(directory)
        if not runs:
            typer.echo(f"{directory} holds no run directories.")
        freed_bytes = 0
        for run in runs:
            pid = f" (process {run.owner.pid})" if run.owner else ""
            line = f"{run.path}  {format_bytes(run.num_bytes)}  {run.state.value}{pid}"
            is_removable = run.state is RunState.DEAD or (checkpoints and run.state is RunState.COMMITTED)
            if list_only or not is_removable:
                typer.echo(line + ("" if list_only else f": left{_why_left(run.state is RunState.COMMITTED)}"))
                continue
            removed = remove_run(run.path, committed=checkpoints)
            freed_bytes += removed.num_bytes
            kept = f", but for {', '.join(removed.left)}, which infinity did not make" if removed.left else ""
            typer.echo(f"{line}: removed{kept}")
        if not list_only and runs:
            typer.echo(f"{format_bytes(freed_bytes)} freed.")


def _why_left(is_checkpoint: bool) -> str:
    return ", it holds a checkpoint (--checkpoints removes it)" if is_checkpoint else ", it is in use"
