"""Collectives that a backend of torch.distributed makes itself, asynchronously to the host: NCCL.

Sums are the backend's: in the dtype of the buffer, in an order that it fixes for equal sizes and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from infinity.comm.order import Entry
from infinity.comm.watch import Watch
from infinity.errors import CommError, InfinityError
from infinity.handles import Handle

if TYPE_CHECKING:  # one rank needs no build of torch that has it
    from torch.distributed.distributed_c10d import Store


class NativeHandle:
    """One collective of the backend. On a GPU `wait` makes the current stream wait, not the host."""

    __slots__ = ("_explain", "_keep", "_work")

    def __init__(self, work: dist.Work, keep: tuple[Tensor, ...], explain: Callable[[BaseException], CommError]) -> None:
        self._work = work
        self._keep = keep
        self._explain = explain

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._explain(error) from error

    def done(self) -> bool:
        return self._work.is_completed()


class NativeCollectives:
    """Tensors on the backend's device. Its opener closes it; after an error of the group it refuses everything with that."""

    def __init__(
        self, backend: str, device_type: str, group: dist.ProcessGroup, watch: Watch, *, owns_default: bool
    ) -> None:
        self.backend = backend
        self.device_type = device_type
        self._group = group
        self._watch = watch
        self._owns_default = owns_default
        self._error: InfinityError | None = None

    def all_gather(self, entry: Entry, shard: Tensor, into: Tensor, after: Handle[None] | None = None) -> Handle[None]:
        if after is not None:
            after.wait()
        return self._handle(
            lambda: _named("all_gather_single", "all_gather_into_tensor")(into, shard, group=self._group, async_op=True),
            shard,
            into,
        )

    def reduce_scatter(self, entry: Entry, flat: Tensor, into: Tensor) -> Handle[None]:
        return self._handle(
            lambda: _named("reduce_scatter_single", "reduce_scatter_tensor")(into, flat, group=self._group, async_op=True),
            flat,
            into,
        )

    def all_reduce(self, entry: Entry, flat: Tensor, own: Tensor) -> Handle[None]:
        self.reduce_scatter(entry, flat, own).wait()  # the host goes on where the backend has streams
        return self.all_gather(entry, own, flat)

    def broadcast(self, entry: Entry, flat: Tensor, source: int) -> Handle[None]:
        return self._handle(lambda: dist.broadcast(flat, group=self._group, group_src=source, async_op=True), flat)

    def fail(self, error: InfinityError) -> None:
        if self._error is None:
            self._error = error
            self._group.abort()  # a kernel that waits for a lost rank would keep the stream, and with it the host, for ever

    def close(self) -> None:
        if self._error is None:
            dist.destroy_process_group(self._group)
            if self._owns_default:
                dist.destroy_process_group()

    def _handle(self, start: Callable[[], dist.Work | None], *keep: Tensor) -> Handle[None]:
        if self._error is not None:
            raise self._error
        try:
            work = start()
        except RuntimeError as error:
            raise self._watch.explain(error) from error
        if work is None:
            raise CommError("This process is not a rank of the group.", remedy="Open the group on every rank of the job.")
        return NativeHandle(work, keep, self._watch.explain)


def open_native_collectives(
    backend: str, device_type: str, store: Store, rank: int, size: int, watch: Watch
) -> NativeCollectives:
    """Make a process group of its own beside the default one, which is made first where the user has not."""
    owns_default = not dist.is_initialized()
    if owns_default:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    group = dist.new_group(backend=backend)
    return NativeCollectives(backend, device_type, group, watch, owns_default=owns_default)


def _named(name: str, older_name: str) -> Callable[..., dist.Work | None]:
    """Return a collective of torch.distributed by the name that this version of torch has for it."""
    collective: Callable[..., dist.Work | None] = getattr(dist, name if hasattr(dist, name) else older_name)
    return collective
