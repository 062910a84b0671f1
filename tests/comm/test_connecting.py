"""Ranks that connect to each other: one that cannot ends the attempt of all."""

from __future__ import annotations

import threading

import torch.distributed as dist
from rank_threads import on_every_rank

from infinity.comm.connect import connect_together


def test_a_rank_that_cannot_connect_ends_the_waiting_of_the_others() -> None:
    """Two ranks wait for a third for good; when it fails they raise what it said, and so does it."""
    store, never, both_wait = dist.HashStore(), threading.Event(), threading.Barrier(3)

    def connect(rank: int) -> str:
        both_wait.wait()
        if rank == 1:
            raise RuntimeError("no route to host\nwith a trace")
        never.wait()
        return "connected"

    results = on_every_rank(3, lambda rank: connect_together(lambda: connect(rank), store, rank))
    never.set()
    assert [str(error) for error in results] == ["rank 1 could not connect: no route to host"] * 3
    assert all(isinstance(error, RuntimeError) for error in results)


def test_what_was_made_is_returned() -> None:
    """Where all connect each has its own."""
    store = dist.HashStore()
    assert on_every_rank(2, lambda rank: connect_together(lambda: rank + 10, store, rank)) == [10, 11]
