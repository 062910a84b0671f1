"""`infinity train` on several ranks of this machine: the same command line for each of them, and the last words."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.byte_sizes import format_bytes
from infinity.cli.console import open_console
from infinity.cli.failures import say_error
from infinity.errors import CommError, StorageError
from infinity.store.directory import remove_dead_runs
from infinity.train.options import TrainOptions
from infinity.train.output import Output, default_output
from infinity.train.preflight import check_wanted


def train_on_ranks(options: TrainOptions, num_ranks: int, *, need_gpus: bool) -> int:
    """Run this process's command line as `num_ranks` ranks and return the exit code of the job.

    The swap files of ranks that died are removed. Raises ConfigError where ranks would not have a GPU each, and before
    any rank is started what all of them would: ConfigError and DataError.
    """
    check_wanted(options, num_ranks)  # or every rank would say it
    from infinity.launch.gpus import require_gpus  # these load torch
    from infinity.launch.run import run_ranks

    require_gpus(num_ranks, asked=need_gpus)
    command = [sys.executable, "-m", "infinity", *sys.argv[1:]]
    output = Output(options.output) if options.output else default_output(options.model)
    if options.output is None:  # every rank must know the same one
        command += ["--output", str(output.directory)]
    outcome = run_ranks(command, num_ranks, os.environ)
    _remove_dead_swap_files(options.config.nvme_directories)
    if outcome.message:
        say_error(outcome.message, outcome.remedy)
        if outcome.lacks_memory:
            for line in plan_lines(output.plan):
                open_console(stderr=True).print(line, markup=False)
    return outcome.exit_code


@contextlib.contextmanager
def dead_swap_files_removed(directories: Sequence[Path]) -> Iterator[None]:
    """Remove the swap files of ranks that died, where the block ends because of one: torchrun leaves them."""
    try:
        yield
    except CommError:
        _remove_dead_swap_files(directories)
        raise


def _remove_dead_swap_files(directories: Sequence[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(StorageError):  # not made, or gone by now
            remove_dead_runs(directory)


def plan_lines(path: Path) -> Iterator[str]:
    """Yield where a rank's bytes were planned to be, from the plan.json of its run; nothing where there is none."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it ended before there was a plan
        return
    yield f"Planned for each rank ({path}):"
    for line in plan["memory"]:
        yield f"  {line['tier']} {line['owner']}  {format_bytes(line['num_bytes'])}: {line['counts']}"
    for tier, budget_bytes in plan["budgets"]:
        yield f"  {tier} memory peak  {format_bytes(plan['memory_bytes'][tier])} of {format_bytes(budget_bytes)}"
    yield f"  nvme total  {format_bytes(plan['disk_bytes'])}"
