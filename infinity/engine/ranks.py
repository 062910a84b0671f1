"""Which rank this process is. Training over several ranks is refused here until it is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of a job."""

    global_rank: int
    local_rank: int  # on this machine
    world_size: int
    local_world_size: int  # ranks on this machine


ONE_RANK = Ranks(global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def ranks_of_this_process(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return the ranks that a launcher says. Raises ConfigError where it has started more than one."""
    said = os.environ if environment is None else environment
    world_size = int(said.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but infinity trains on one rank: every process would train a model of its own.",
            remedy="Start one process, without a launcher.",
        )
    return Ranks(0, int(said.get("LOCAL_RANK", "0")), world_size, local_world_size=1)
