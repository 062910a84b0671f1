"""What a rank finds in its environment: the variables that torchrun sets, and this machine's share of its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.launch.error_file import ERROR_FILE

_LOOPBACK = Path("/sys/class/net/lo")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet: the launcher's store."""

    address: str
    port: int
    job: str  # the name of the job
    agent_store: bool  # the launcher's own store is there: no rank opens one


def ranks_wanted(num_ranks: int | None, num_gpus: int | None, environment: Mapping[str, str]) -> int:
    """Return how many ranks this process is to start: 1 means none, it is the only one or one of them already.

    `num_ranks` and `num_gpus` are --num-ranks and --num-gpus. Raises ConfigError where they contradict each other or the
    launcher that has started this process.
    """
    given = {"--num-gpus": num_gpus, "--num-ranks": num_ranks}
    asked = {option: number for option, number in given.items() if number is not None}
    for option, number in asked.items():
        if number < 1:
            raise ConfigError(f"{option}: {number} is too small.", remedy="Give at least 1.")
    if len(set(asked.values())) > 1:
        raise ConfigError(
            f"--num-gpus {num_gpus} contradicts --num-ranks {num_ranks}.",
            remedy="Give one of them: --num-ranks is for a machine without GPUs.",
        )
    if not asked:
        return 1
    option, number = next(iter(asked.items()))
    started = environment.get("WORLD_SIZE", "1")
    if started == "1":
        return number
    if started != str(number):
        raise ConfigError(
            f"{option} {number}: this process is one of {started} ranks that a launcher has started (WORLD_SIZE).",
            remedy=f"Leave {option} out under torchrun, or start without torchrun.",
        )
    return 1


def rank_environment(base: Mapping[str, str], meeting: Meeting, rank: int, size: int, error_file: Path) -> dict[str, str]:
    """Return the environment of one of `size` ranks, all on this machine; `base` is the launcher's own.

    What the user has set of threads, logs and network interface stays.
    """
    chosen = {
        "OMP_NUM_THREADS": str(max(1, _num_cores() // size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch's warnings of lost connections, on top of what the ranks say themselves
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if _LOOPBACK.exists():
        chosen["GLOO_SOCKET_IFNAME"] = _LOOPBACK.name  # gloo asks for the host's name otherwise, which may lead nowhere
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **chosen,
        **base,
        **dict.fromkeys(names, str(rank)),
        **dict.fromkeys(sizes, str(size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "rank",
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": meeting.job,
        "TORCHELASTIC_USE_AGENT_STORE": str(meeting.agent_store),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        ERROR_FILE: str(error_file),
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
