"""Collectives over gloo, made of sends and receives: what gloo lacks in some types, and one order of sums for all of them.

gloo's own ring adds the ranks in an order that depends on where in the buffer an element stands, and rounds after each
addition. Here each element is summed in fp32, rank 0 first, and rounded once: whatever the stage, the shard and the cut into
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.comm.buckets import BUCKET_BYTES, SUMS_IN_FLIGHT, Bucket, cut
from infinity.comm.line import Line, Peers, Transfers
from infinity.comm.order import Entry
from infinity.errors import InfinityError
from infinity.handles import Handle


class GlooCollectives:
    """Tensors on the host. The line's thread does the work; the group that opened the line closes it."""

    backend = "gloo"
    device_type = "cpu"

    def __init__(self, line: Line, peers: Peers, received: Sequence[Tensor], total: Tensor) -> None:
        self._line = line
        self._peers = peers
        self._received = received  # for each bucket in flight: uint8 [size - 1, BUCKET_BYTES]
        self._total = total  # fp32, the elements of a bucket in the narrowest dtype

    def all_gather(self, entry: Entry, shard: Tensor, into: Tensor, after: Handle[None] | None = None) -> Handle[None]:
        def gather() -> None:
            if after is not None:
                after.wait()
            self._all_gather(shard, into)

        return self._line.submit(entry, gather)

    def reduce_scatter(self, entry: Entry, flat: Tensor, into: Tensor) -> Handle[None]:
        return self._line.submit(entry, lambda: self._reduce_scatter(flat, into))

    def all_reduce(self, entry: Entry, flat: Tensor, own: Tensor) -> Handle[None]:
        def both() -> None:
            self._reduce_scatter(flat, own)
            self._all_gather(own, flat)

        return self._line.submit(entry, both)

    def broadcast(self, entry: Entry, flat: Tensor, source: int) -> Handle[None]:
        def send_or_receive() -> None:
            if self._peers.rank == source:
                self._peers.exchange([(peer, flat) for peer in self._peers.others], [])
            else:
                self._peers.exchange([], [(source, flat)])

        return self._line.submit(entry, send_or_receive)

    def fail(self, error: InfinityError) -> None:
        """The line has it already."""

    def close(self) -> None:
        """Nothing of its own: the line belongs to the group."""

    def _all_gather(self, shard: Tensor, into: Tensor) -> None:
        parts = _shards(into, self._peers.size)
        parts[self._peers.rank].copy_(shard)  # nothing where both are one
        self._peers.exchange(
            [(peer, shard) for peer in self._peers.others], [(peer, parts[peer]) for peer in self._peers.others]
        )

    def _reduce_scatter(self, flat: Tensor, into: Tensor) -> None:
        parts = _shards(flat, self._peers.size)
        buckets = cut(into.numel(), BUCKET_BYTES // flat.element_size())
        under_way: list[tuple[list[Tensor], Transfers]] = []
        for number, bucket in enumerate([*buckets, None]):
            if bucket is not None:
                under_way.append(self._start(parts, bucket, self._received[number % SUMS_IN_FLIGHT]))
            if number > 0:
                contributions, transfers = under_way.pop(0)
                transfers.wait()
                self._sum(contributions, into[buckets[number - 1].slice])

    def _start(self, parts: Sequence[Tensor], bucket: Bucket, received: Tensor) -> tuple[list[Tensor], Transfers]:
        """Begin one bucket: every rank gets its part of mine, and I get every rank's part for me. Returns these by rank."""
        mine = parts[self._peers.rank][bucket.slice]
        rows = dict(zip(self._peers.others, received, strict=True))
        num_bytes = mine.numel() * mine.element_size()
        contributions = [
            mine if rank == self._peers.rank else rows[rank][:num_bytes].view(mine.dtype) for rank in range(self._peers.size)
        ]
        transfers = self._peers.start(
            [(peer, parts[peer][bucket.slice]) for peer in self._peers.others],
            [(peer, contributions[peer]) for peer in self._peers.others],
        )
        return contributions, transfers

    def _sum(self, contributions: Sequence[Tensor], into: Tensor) -> None:
        total = self._total[: into.numel()]
        total.copy_(contributions[0])
        for contribution in contributions[1:]:
            total.add_(contribution)
        into.copy_(total)


def open_gloo_collectives(line: Line, peers: Peers) -> GlooCollectives:
    """Take the scratch memory of `scratch_bytes` and return the collectives over `line`."""
    received = [torch.empty((peers.size - 1, BUCKET_BYTES), dtype=torch.uint8) for _ in range(SUMS_IN_FLIGHT)]
    return GlooCollectives(line, peers, received, torch.empty(BUCKET_BYTES // 2, dtype=torch.float32))


def _shards(flat: Tensor, size: int) -> list[Tensor]:
    num_elements = flat.numel() // size
    return [flat[rank * num_elements : (rank + 1) * num_elements] for rank in range(size)]
