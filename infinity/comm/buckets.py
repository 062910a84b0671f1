"""Flat buckets: how a shard is cut so that a sum over ranks needs little memory beside its buffers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
