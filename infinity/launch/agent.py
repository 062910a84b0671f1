"""Torch's elastic agent with our ranks: it holds the store where they meet and numbers them; `Job` watches over them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from infinity.launch.environment import Meeting
from infinity.launch.job import Job
from infinity.launch.rank_process import RankProcess

_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.1
# What a killed process needs to be gone; one that hangs in the kernel (a broken disk or GPU) is left to it.
_GONE_SECONDS = 5.0

StartRank = Callable[[int, Meeting], RankProcess]


class RankAgent(SimpleElasticAgent):
    """The four parts that torch leaves to those who extend its agent; torch's own LocalElasticAgent ends every other rank
    the moment that one has ended, also while rank 0 writes a checkpoint.
    """

    def __init__(self, spec: WorkerSpec, job: Job, start: StartRank) -> None:
        super().__init__(spec)
        self._job = job
        self._start = start

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        handler = worker_group.spec.rdzv_handler
        meeting = Meeting(
            address=str(worker_group.master_addr),
            port=int(str(worker_group.master_port)),
            job=handler.get_run_id(),
            agent_store=handler.use_agent_store,
        )
        self._job.begin(partial(self._start, worker.global_rank, meeting) for worker in worker_group.workers)
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}  # how torch names them to itself

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._job.look():
            return RunResult(state=WorkerState.HEALTHY)
        if self._job.outcome().exit_code:
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={one.global_rank: None for one in worker_group.workers})

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, *_: object, **__: object) -> None:
        """Leave no rank behind, whatever ends the agent."""
        self._job.kill()
        until = time.monotonic() + _GONE_SECONDS
        while not self._job.look() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)


def run_agent(num_ranks: int, job: Job, start: StartRank) -> None:
    """Start `num_ranks` ranks on this machine, which meet over the loopback interface, and return when all have ended."""
    handler = _open_rendezvous(uuid.uuid4().hex)
    try:
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_ranks,
            rdzv_handler=handler,
            entrypoint="infinity",
            max_restarts=0,
            monitor_interval=_LOOK_SECONDS,
        )
        RankAgent(spec, job, start).run()
    finally:
        handler.shutdown()


def _open_rendezvous(job: str) -> RendezvousHandler:
    """Return the meeting place of one machine's ranks, at a port that the system chooses."""
    options: Mapping[str, object] = {"is_host": True}
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint=f"{_LOOPBACK}:0", run_id=job, min_nodes=1, max_nodes=1, local_addr=_LOOPBACK, **options
        )
    )
