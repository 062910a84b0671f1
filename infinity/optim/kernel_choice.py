"""Instruction set and number of threads of the Adam kernel: what the CPU has, what the process may use, what is asked for.

Launchers start several ranks on one machine and set LOCAL_RANK and LOCAL_WORLD_SIZE for each: the cores are shared out
evenly. OMP_NUM_THREADS, which they set to 1, is not about this kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import ConfigError

KERNEL_VARIABLE = "INFINITY_CPU_ADAM"
THREADS_VARIABLE = "INFINITY_ADAM_THREADS"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An instruction set and a team. Its threads run on part `share_index` of `num_shares` equal parts of the cores."""

    name: str
    num_threads: int
    num_cores: int  # that this process may use
    num_local_ranks: int
    share_index: int
    num_shares: int

    def words(self) -> str:
        """Return the choice as one reads it."""
        ranks = f", shared by {self.num_local_ranks} ranks" if self.num_local_ranks > 1 else ""
        return f"{self.name}, {self.num_threads} of {self.num_cores} cores{ranks}"


def choose(names: Sequence[str], *, num_cores: int, num_threads: int | None, environment: Mapping[str, str]) -> KernelChoice:
    """Return the first of `names` or the one that INFINITY_CPU_ADAM asks for, and the size of its team.

    `num_threads`, else INFINITY_ADAM_THREADS, else this rank's share of the cores; never more threads than cores.
    Raises ConfigError for an unknown name and for a number that is not a whole one from 1.
    """
    name = environment.get(KERNEL_VARIABLE) or names[0]
    if name not in names:
        raise ConfigError(
            f"{KERNEL_VARIABLE}={name!r}: this CPU has no such Adam kernel.", remedy=f"Choose one of {', '.join(names)}."
        )
    num_ranks = _count(environment, "LOCAL_WORLD_SIZE", least=1) or 1
    rank = (_count(environment, "LOCAL_RANK", least=0) or 0) % num_ranks
    share = max(1, num_cores // num_ranks)
    asked = _count(environment, THREADS_VARIABLE, least=1) if num_threads is None else num_threads
    if asked is not None and asked < 1:
        raise ConfigError(f"Adam threads: {asked} is too few.", remedy="Give 1 or more.")
    count = min(share if asked is None else asked, num_cores)
    index, num_shares = (rank, num_ranks) if count <= share else (0, 1)  # more than its share: it may go anywhere
    return KernelChoice(name, count, num_cores, num_ranks, index, num_shares)


def allowed_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(environment: Mapping[str, str], variable: str, *, least: int) -> int | None:
    text = environment.get(variable)
    if not text:
        return None
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{variable}={text!r} is not a whole number from {least}.", remedy="Correct it or leave it unset.")
    return int(text)
