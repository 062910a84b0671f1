"""Processes that play the ranks of one job after another, so that a case does not pay for starting them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any

import torch.distributed as dist
from rank_work import Outcome, Work

WORKER = Path(__file__).with_name("rank_worker.py")
TRACEBACK_SECONDS = 1.0  # given to a rank that hangs to write where it is
SHOWN_CHARACTERS = 6000


class RanksFailed(AssertionError):
    """At least one rank did not come to the end of its work; says for each what happened to it."""


class RankProcess:
    """One process, the pipe to it, and the file that takes what it prints."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=self._printed,
            stderr=self._printed,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
            | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self.pipe = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self, rank: int, why: str) -> Outcome:
        """End a rank that answers no more, and return what it printed; one that still runs says first where it is."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(TRACEBACK_SECONDS)
        code = self.end()
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")[-SHOWN_CHARACTERS:]
        return Outcome(rank, error=why, message=f"process {self.pid} ended with {code}", traceback=printed)

    def end(self) -> int:
        """Kill the process if it still runs; return its exit status."""
        self.pipe.close()
        self._process.kill()
        return self._process.wait()


class RankPool:
    """Ranks 0, 1, ... of any number of jobs, one job at a time. Its owner calls `close`.

    Processes are started when a job first needs them. Each job has a rendezvous of its own; a process that died or hung
    is replaced for the next one.
    """

    def __init__(self) -> None:
        self._processes: dict[int, RankProcess] = {}

    def outcomes(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *,
        seconds: float = 60.0,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> list[Outcome]:
        """Call `function` on every rank, which must be importable there, and return how it ended, in rank order.

        `by_rank` gives each rank arguments of its own. What has not answered after `seconds` is ended.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's; outlives the ranks
        given = by_rank or [{}] * num_ranks
        missing: dict[Any, int] = {}
        for rank in range(num_ranks):
            process = self._process(rank)
            work = Work(function, {**arguments, **given[rank]}, launcher_variables(rank, num_ranks, store.port))
            process.pipe.send_bytes(pickle.dumps(work))
            missing[process.pipe] = rank
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + seconds
        while missing:
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready or list(missing):
                rank = missing.pop(pipe)
                found[rank] = self._answer(rank) if ready else self._give_up(rank, f"no answer in {seconds:g} s")
        return [found[rank] for rank in range(num_ranks)]

    def run(self, num_ranks: int, function: Callable[..., Any], **options: Any) -> list[Any]:
        """Call `function` on every rank and return the values in rank order. Raises RanksFailed where a rank has none."""
        outcomes = self.outcomes(num_ranks, function, **options)
        if any(outcome.error for outcome in outcomes):
            raise RanksFailed("\n".join(describe(outcome) for outcome in outcomes))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End every process."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _process(self, rank: int) -> RankProcess:
        if rank not in self._processes:
            self._processes[rank] = RankProcess()
        return self._processes[rank]

    def _answer(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._processes[rank].pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return self._give_up(rank, "died")
        return outcome

    def _give_up(self, rank: int, why: str) -> Outcome:
        return self._processes.pop(rank).last_words(rank, why)


def launcher_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def describe(outcome: Outcome) -> str:
    """Return what happened to a rank, with its traceback."""
    if outcome.error is None:
        return f"rank {outcome.rank}: came to the end"
    return f"rank {outcome.rank}: {outcome.error}: {outcome.message}\n{outcome.traceback}"
