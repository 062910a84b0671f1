"""Opens the group of this process: from a launcher's environment or its store; one rank needs neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from infinity.comm.connect import connect_together
from infinity.comm.gloo import open_gloo_collectives
from infinity.comm.group import Group
from infinity.comm.line import Line, Peers, PointToPoint
from infinity.comm.local import Local
from infinity.comm.native import open_native_collectives
from infinity.comm.order import Order
from infinity.comm.ranks import RankGroup
from infinity.comm.watch import Pace, Watch
from infinity.errors import CommError, ConfigError, InfinityError
from infinity.telemetry.recorder import Recorder

if TYPE_CHECKING:  # one rank needs no build of torch that has it
    from torch.distributed.distributed_c10d import Store

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# How long ranks wait for one that has not come to open the group.
_MEETING = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a job meet: a store that all of them reach, and which rank this one is."""

    store: Store
    rank: int
    size: int


def meet(environment: Mapping[str, str]) -> Rendezvous | None:
    """Return the rendezvous that torchrun's variables in this process's environment name; None for one rank or none.

    Raises ConfigError when some of them are missing or wrong, CommError when the store cannot be reached.
    """
    if "WORLD_SIZE" not in environment or environment["WORLD_SIZE"] == "1":
        return None
    missing = [name for name in _VARIABLES if name not in environment]
    wrong = [
        name for name in _VARIABLES if name != "MASTER_ADDR" and name in environment and not environment[name].isdigit()
    ]
    if missing or wrong:
        raise ConfigError(
            f"The environment says WORLD_SIZE={environment['WORLD_SIZE']}, but not how to meet the other ranks: "
            + "; ".join([f"{name} is missing" for name in missing] + [f"{name} is {environment[name]!r}" for name in wrong])
            + ".",
            remedy="Start the ranks with torchrun, or set all of " + ", ".join(_VARIABLES) + ".",
        )
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_MEETING))  # type: ignore[attr-defined]
    except RuntimeError as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise CommError(
            f"Rank {environment['RANK']} cannot reach the rendezvous store at {where}: {str(error).splitlines()[0]}",
            remedy="Check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT can be reached from here.",
        ) from error
    return Rendezvous(store, rank, size)


def open_group(
    rendezvous: Rendezvous | None,
    *,
    device: torch.device,
    recorder: Recorder,
    resident_bytes: Callable[[], int],
    pace: Pace | None = None,
) -> Group:
    """Return this process's group: gloo for buffers on the host, NCCL for those on a GPU, Local for one rank.

    `resident_bytes` measures this process's memory: the last value is what the others can say about a rank that died.
    Every rank of the job must call it; raises CommError when one does not come, or cannot connect to the others.
    """
    if rendezvous is None or rendezvous.size == 1:
        return Local()
    rank, size = rendezvous.rank, rendezvous.size
    try:
        number = rendezvous.store.add(f"infinity/opened/{rank}", 1)  # a job may open one group after another over one store
        store = _below(f"infinity/{number}", rendezvous.store)
        backends = connect_together(
            lambda: [dist.ProcessGroupGloo(_below(name, store), rank, size, _MEETING) for name in ("gloo", "gloo-words")],
            _below("connect", store.clone()),  # type: ignore[attr-defined]  # not in torch's stubs
            rank,
        )
    except RuntimeError as error:
        raise CommError(
            f"Rank {rank} of {size} met no full group: {str(error).splitlines()[0]}",
            remedy="Check that all ranks were started; GLOO_SOCKET_IFNAME names the network interface between machines.",
        ) from error
    order = Order()
    opened: list[RankGroup] = []

    def end_by(error: InfinityError) -> None:
        opened[0].end_by(error)

    watch = Watch(
        rank=rank,
        size=size,
        store=_below("beats", store.clone()),  # type: ignore[attr-defined]  # not in torch's stubs
        order=order,
        pace=pace or Pace(),
        resident_bytes=resident_bytes,
        on_verdict=end_by,
    )
    peers, listeners = (Peers(cast(PointToPoint, backend), rank, size) for backend in backends)
    line, words = Line(peers, watch, recorder, end_by), Line(listeners, watch, recorder, end_by)
    collectives = (
        open_gloo_collectives(line, peers)
        if device.type == "cpu"
        else open_native_collectives("nccl", device.type, _below("native", store), rank, size, watch)
    )
    group = RankGroup(
        collectives=collectives, line=line, words=words, peers=listeners, order=order, watch=watch, recorder=recorder,
        keep=rendezvous.store,
    )  # fmt: skip
    opened.append(group)
    line.start()
    words.start()
    watch.start()
    return group


def _below(prefix: str, store: Store) -> Store:
    """Return the same store with keys of their own."""
    below: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return below
