"""Small pieces of work for ranks, which try the pool itself."""

from __future__ import annotations

import os
import signal
import time

import torch

from infinity.comm.open_group import meet, open_group
from infinity.errors import CommError
from infinity.memory.limits import rss_bytes
from infinity.telemetry.recorder import Recorder


def sum_over_ranks(value: float) -> tuple[int, float]:
    """Return this process and the sum of all ranks' values, through a group of their own."""
    group = open_group(meet(os.environ), device=torch.device("cpu"), recorder=Recorder(), resident_bytes=rss_bytes)
    flat = torch.full((group.size,), value)
    group.all_reduce(flat, what="values").wait()
    group.close()
    return os.getpid(), float(flat[0])


def fail_on(rank: int) -> int:
    """Raise an error of infinity on one rank."""
    if int(os.environ["RANK"]) == rank:
        raise CommError("This rank was told to fail.", remedy="Tell it otherwise.")
    return rank


def die_on(rank: int) -> None:
    """Kill the process of one rank."""
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(rank: int) -> None:
    """Never come back on one rank."""
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)
