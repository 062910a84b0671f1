"""Which rank this process is among those that a launcher has started, from its environment; no torch."""

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
    local_world_size: int  # ranks that share this machine's memory and disks

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that shows and writes for all."""
        return self.global_rank == 0

    @property
    def speaks_for_machine(self) -> bool:
        """Whether this rank is the one that checks what the ranks of its machine share."""
        return self.local_rank == 0


ONE_RANK = Ranks(global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def launched_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return what torchrun's variables say: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.

    Without the last two all ranks are on this machine. Raises ConfigError for what is no count, or no rank below it.
    """
    said = os.environ if environment is None else environment
    size = _number(said, "WORLD_SIZE", 1)
    if size == 1:
        return ONE_RANK
    rank = _number(said, "RANK", None)
    local_size = _number(said, "LOCAL_WORLD_SIZE", size)
    local_rank = _number(said, "LOCAL_RANK", rank % max(1, local_size))
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ConfigError(
            f"The environment says RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}: "
            "a rank is counted from 0 and below its number of ranks.",
            remedy="Start the ranks with torchrun.",
        )
    return Ranks(rank, local_rank, size, local_size)


def _number(said: Mapping[str, str], name: str, otherwise: int | None) -> int:
    text = said.get(name, "" if otherwise is None else str(otherwise))
    if not text.isdigit():
        problem = f"{name} is {text!r}" if name in said else f"{name} is missing"
        raise ConfigError(
            f"The environment says WORLD_SIZE={said.get('WORLD_SIZE')}, but {problem}.",
            remedy="Start the ranks with torchrun.",
        )
    return int(text)
