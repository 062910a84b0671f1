"""Flat buckets: how a shard is cut so that a sum over ranks needs little memory beside its buffers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Sums are made of buckets of at most this many bytes of a shard: one is added up while the next one is on its way.
BUCKET_BYTES = 1 << 20
SUMS_IN_FLIGHT = 2
_NARROWEST_BYTES, _SUM_BYTES = 2, 4


def scratch_bytes(size: int) -> int:
    """Return what sums over `size` ranks take beside their buffers, for as long as the group is open: none for one rank."""
    if size == 1:
        return 0
    return SUMS_IN_FLIGHT * (size - 1) * BUCKET_BYTES + BUCKET_BYTES // _NARROWEST_BYTES * _SUM_BYTES


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of every rank's shard."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


def cut(num_elements: int, bucket_elements: int) -> tuple[Bucket, ...]:
    """Return a shard's buckets in ascending order: whole ones, then the rest. No bucket is empty."""
    return tuple(
        Bucket(start, min(start + bucket_elements, num_elements)) for start in range(0, num_elements, bucket_elements)
    )
