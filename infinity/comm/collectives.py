"""How data crosses between ranks: what a group asks of its backend, once order, sizes and counting are settled."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from infinity.comm.order import Entry
from infinity.errors import InfinityError
from infinity.handles import Handle


class Collectives(Protocol):
    """One backend's way. Buffers are as `Group` says, and checked; `entry` is the call's place in the order."""

    @property
    def backend(self) -> str: ...
    @property
    def device_type(self) -> str:
        """Where buffers must be: "cpu" or "cuda"."""
        ...

    def all_gather(self, entry: Entry, shard: Tensor, into: Tensor, after: Handle[None] | None = None) -> Handle[None]: ...
    def reduce_scatter(self, entry: Entry, flat: Tensor, into: Tensor) -> Handle[None]: ...
    def all_reduce(self, entry: Entry, flat: Tensor, own: Tensor) -> Handle[None]: ...
    def broadcast(self, entry: Entry, flat: Tensor, source: int) -> Handle[None]: ...
    def fail(self, error: InfinityError) -> None:
        """Refuse everything from now on with `error`, and free what waits for a rank that will not come. Any thread."""
        ...

    def close(self) -> None: ...
