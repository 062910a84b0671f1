"""Several ranks in one process: a thread and a gloo group each, over loopback."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from infinity.comm.group import Group
from infinity.comm.open_group import Rendezvous, open_group
from infinity.comm.watch import Pace
from infinity.telemetry.recorder import Recorder

T = TypeVar("T")
QUICK = Pace(beat_seconds=0.05, dead_seconds=20.0)  # a busy machine must not look dead
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def on_every_rank(size: int, job: Callable[[int], T]) -> list[T | BaseException]:
    """Run `job(rank)` on a thread for each rank; return what each gave or raised, in rank order."""
    results: list[T | BaseException] = [TimeoutError("still running")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = job(rank)
        except Exception as error:  # noqa: BLE001 - a result like any other
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def open_threads(
    size: int, recorders: list[Recorder] | None = None, *, store: dist.Store | None = None, pace: Pace = QUICK
) -> list[Group]:
    """Return the groups of `size` ranks, opened together."""
    store = dist.HashStore() if store is None else store

    def job(rank: int) -> Group:
        return open_group(
            Rendezvous(store, rank, size),
            device=torch.device("cpu"),
            recorder=recorders[rank] if recorders else Recorder(),
            resident_bytes=lambda: (rank + 1) << 30,
            pace=pace,
        )

    groups = on_every_rank(size, job)
    for group in groups:
        if isinstance(group, BaseException):
            raise group
    return groups  # type: ignore[return-value]


@contextmanager
def ranks(size: int, recorders: list[Recorder] | None = None) -> Iterator[list[Group]]:
    """The groups of `size` ranks for the length of a test; `None` is what every close must give."""
    groups = open_threads(size, recorders)
    yield groups
    assert on_every_rank(size, lambda rank: groups[rank].close()) == [None] * size
