"""A group of one rank: the protocol without any torch.distributed, and without copies where both buffers are one."""

from __future__ import annotations

import json

from torch import Tensor

from infinity.comm.group import Json, require_flat, require_shards, require_summable
from infinity.handles import Handle, Ready


class Local:
    """The only rank. Everything is done when the call returns, nothing crosses a link, and there is nobody to wait for."""

    rank = 0
    size = 1
    backend = "local"

    def begin_step(self, step: int) -> None:
        """Nothing to compare steps with."""

    def all_gather(self, shard: Tensor, into: Tensor, *, what: str, after: Handle[None] | None = None) -> Handle[None]:
        require_shards(shard, into, 1, what)
        if after is not None:
            after.wait()
        into.copy_(shard)
        return Ready(None)

    def reduce_scatter(self, flat: Tensor, into: Tensor, *, what: str) -> Handle[None]:
        require_shards(into, flat, 1, what)
        require_summable(flat, what)
        into.copy_(flat)
        return Ready(None)

    def all_reduce(self, flat: Tensor, *, what: str) -> Handle[None]:
        require_flat(flat, what)
        require_summable(flat, what)
        return Ready(None)

    def broadcast(self, flat: Tensor, *, source: int, what: str) -> Handle[None]:
        require_flat(flat, what)
        return Ready(None)

    def gather(self, value: Json, *, what: str) -> list[Json]:
        return [json.loads(json.dumps(value))]  # as several ranks would get it

    def fail(self, reason: str) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to free."""
