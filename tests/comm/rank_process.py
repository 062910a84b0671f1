"""One rank as a process of its own, met through a launcher's environment; prints a line of JSON for each thing it saw."""

from __future__ import annotations

import json
import os
import signal
import time

import torch

from infinity.comm.group import Group
from infinity.comm.native import open_native_collectives
from infinity.comm.open_group import meet, open_group
from infinity.comm.order import Order
from infinity.comm.watch import Pace
from infinity.errors import InfinityError
from infinity.memory.limits import rss_bytes
from infinity.telemetry.recorder import Recorder


def say(**facts: object) -> None:
    """Print facts as a line of JSON."""
    print(json.dumps(facts), flush=True)


def sums(group: Group) -> None:
    """An all_reduce of bf16 over real processes."""
    flat = torch.full((6,), float(1 + group.rank), dtype=torch.bfloat16)
    group.all_reduce(flat, what="gradient").wait()
    say(sum=flat.tolist(), backend=group.backend)


def native(group: Group, rendezvous) -> None:
    """The collectives that NCCL serves, over gloo's own: the same calls, without a GPU."""
    collectives = open_native_collectives("gloo", "cpu", rendezvous.store, group.rank, group.size, group._watch)  # type: ignore[attr-defined]
    entry = Order().add("test")
    flat = torch.arange(6.0) + 10 * group.rank
    shard, whole, everywhere = torch.empty(2), torch.empty(6), flat.clone()
    collectives.reduce_scatter(entry, flat, shard).wait()
    handle = collectives.all_gather(entry, shard, whole)
    handle.wait()
    handle.wait()
    collectives.all_reduce(entry, everywhere, everywhere[2 * group.rank : 2 * group.rank + 2]).wait()
    collectives.broadcast(entry, flat, 2).wait()
    say(whole=whole.tolist(), everywhere=everywhere.tolist(), source=flat.tolist(), done=handle.done())
    collectives.close()


def main() -> int:
    """Three ranks work, then rank 1 kills itself while the others wait for it."""
    rendezvous = meet(os.environ)
    group = open_group(
        rendezvous, device=torch.device("cpu"), recorder=Recorder(), resident_bytes=rss_bytes, pace=Pace(beat_seconds=0.1)
    )
    sums(group)
    native(group, rendezvous)
    group.begin_step(9)
    group.gather(None, what="before")
    if group.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_gather(torch.zeros(1), torch.zeros(3), what="blocks.4").wait()
    except InfinityError as error:
        say(error=str(error))
        group.fail(error.message)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
