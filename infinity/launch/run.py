"""Runs a command as several ranks on this machine, and returns how that ended."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from infinity.launch.agent import run_agent
from infinity.launch.ends import Outcome
from infinity.launch.environment import Meeting, rank_environment
from infinity.launch.job import Job
from infinity.launch.rank_process import RankProcess, start_rank

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_ranks(command: Sequence[str], num_ranks: int, environment: Mapping[str, str]) -> Outcome:
    """Run `command` as ranks 0 to num_ranks - 1 until all have ended; no process of theirs is left then.

    SIGINT and SIGTERM are passed on to the ranks, which are waited for. A rank that dies ends the others within 10 seconds.
    Call it from the main thread. Raises OSError where the command cannot be started.
    """
    job = Job()
    with tempfile.TemporaryDirectory(prefix="infinity-launch-") as directory:

        def start(rank: int, meeting: Meeting) -> RankProcess:
            error_file = Path(directory) / f"rank{rank}.json"
            return start_rank(command, rank, rank_environment(environment, meeting, rank, num_ranks, error_file), error_file)

        with _signals_noted(job):
            run_agent(num_ranks, job, start)
    return job.outcome()


@contextmanager
def _signals_noted(job: Job) -> Iterator[None]:
    def note(number: int, _frame: FrameType | None) -> None:
        job.note(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
