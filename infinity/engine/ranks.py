"""Which rank this process is, and how it joins the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch

from infinity.comm.group import Group
from infinity.comm.open_group import meet, open_group
from infinity.errors import ConfigError, InfinityError
from infinity.memory.limits import rss_bytes
from infinity.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of a job."""

    global_rank: int
    local_rank: int  # on this machine
    world_size: int
    local_world_size: int  # ranks on this machine


ONE_RANK = Ranks(global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def ranks_of_this_process(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return the ranks that a launcher says (torchrun's variables); without one, one rank. Raises ConfigError.

    Without LOCAL_WORLD_SIZE all ranks are taken to be on this machine.
    """
    said = os.environ if environment is None else environment
    world_size = _number(said, "WORLD_SIZE", 1)
    if world_size == 1:
        return Ranks(0, _number(said, "LOCAL_RANK", 0), 1, 1)
    rank = _number(said, "RANK", 0)
    return Ranks(rank, _number(said, "LOCAL_RANK", rank), world_size, _number(said, "LOCAL_WORLD_SIZE", world_size))


def join_ranks(device: torch.device, recorder: Recorder, resources: ExitStack) -> Group:
    """Open the group of this process's ranks; `resources` leaves it: after an exception the others are told.

    Raises ConfigError and CommError.
    """
    group = open_group(meet(os.environ), device=device, recorder=recorder, resident_bytes=rss_bytes)

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        reason = error or getattr(sys, "last_value", None)  # the latter: at the end of a program that an exception ended
        if reason is None:
            group.close()
        else:
            group.fail(reason_words(reason))

    resources.push(leave)
    return group


def reason_words(error: BaseException) -> str:
    """Return what other ranks are told of an error."""
    return str(error) if isinstance(error, InfinityError) else f"{type(error).__name__}: {error}"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    said = environment.get(name, str(default))
    if not said.isdigit():
        raise ConfigError(f"{name} is {said!r}, not a number.", remedy="Start the ranks with a launcher.")
    return int(said)
