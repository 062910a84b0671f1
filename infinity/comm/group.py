"""What a rank can ask of the other ranks: one protocol for one rank, for gloo, for NCCL; and what follows from `gather`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinity.errors import CommError
from infinity.handles import Handle

# What `gather` carries: what JSON can say, NaN and infinities included. Tuples arrive as lists.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Group(Protocol):
    """The ranks of a job, as one of them sees them.

    One thread at a time calls it; every rank makes the same calls in the same order.

    `what` names the unit or the purpose of a call: it is part of the order that ranks compare, and of what an error quotes.
    Buffers are flat (1D, contiguous), equal in size and dtype on every rank, on the group's device, and not touched until
    the handle is done, which keeps them alive. A flat buffer is `size` equal shards, rank 0's first. Each call, and each
    wait, raises the CommError that ended the group.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> str:
        """ "local", "gloo" or "nccl"."""
        ...

    def begin_step(self, step: int) -> None:
        """The calls from now on belong to `step`: part of the order, and of what an error says."""
        ...

    def all_gather(self, shard: Tensor, into: Tensor, *, what: str, after: Handle[None] | None = None) -> Handle[None]:
        """Fill `into` with every rank's shard. `shard` may be this rank's part of `into`. Any dtype.

        `after`: what fills `shard`; the data moves when that is done, in the order of the calls all the same. Over gloo the
        caller does not wait for it. What it raises ends the group.
        """
        ...

    def reduce_scatter(self, flat: Tensor, into: Tensor, *, what: str) -> Handle[None]:
        """Sum `flat` over ranks and give each rank its shard of the sum. `into` may be this rank's part of `flat`.

        fp32, bf16 or fp16. Over gloo each element is summed in fp32 in the order of the ranks and rounded once.
        """
        ...

    def all_reduce(self, flat: Tensor, *, what: str) -> Handle[None]:
        """Sum `flat` over ranks in place: a reduce_scatter and an all_gather, so with the sums of the former bit for bit."""
        ...

    def broadcast(self, flat: Tensor, *, source: int, what: str) -> Handle[None]:
        """Fill `flat` with that of rank `source`. Any dtype."""
        ...

    def gather(self, value: Json, *, what: str) -> list[Json]:
        """Return every rank's small value, in rank order, on every rank; blocks."""
        ...

    def fail(self, reason: str) -> None:
        """Tell the other ranks why this one cannot go on, before it ends: they stop with it. Frees what `close` frees."""
        ...

    def close(self) -> None:
        """Meet the other ranks once more and end. Raises CommError where another rank goes on instead."""
        ...


def minimum(group: Group, value: float, *, what: str) -> float:
    """Return the least of the ranks' values; NaN where any is NaN."""
    numbers = [float(theirs) for theirs in group.gather(value, what=what)]  # type: ignore[arg-type]  # all give floats here
    return math.nan if any(map(math.isnan, numbers)) else min(numbers)


def require_shards(shard: Tensor, flat: Tensor, size: int, what: str) -> None:
    """Raise CommError unless `flat` is `size` times `shard`, both flat, of one dtype and on one device."""
    require_flat(flat, what)
    require_flat(shard, what)
    if flat.numel() != shard.numel() * size or flat.dtype != shard.dtype or flat.device != shard.device:
        raise CommError(
            f"{what}: {size} shards of {shard.numel()} x {shard.dtype} on {shard.device} do not make a flat buffer of "
            f"{flat.numel()} x {flat.dtype} on {flat.device}.",
            remedy="Pad a unit to equal shards, and keep both buffers in one dtype.",
        )


def require_flat(flat: Tensor, what: str) -> None:
    """Raise CommError unless `flat` is one run of memory."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise CommError(
            f"{what}: a tensor of shape {tuple(flat.shape)} and strides {flat.stride()} is not flat.",
            remedy="Give a flat buffer.",
        )


def require_summable(flat: Tensor, what: str) -> None:
    """Raise CommError for a dtype that has no defined sum."""
    if flat.dtype not in SUMMED_DTYPES:
        raise CommError(
            f"{what}: {flat.dtype} is not summed over ranks.", remedy=f"Use one of {', '.join(map(str, SUMMED_DTYPES))}."
        )


def own_shard(flat: Tensor, rank: int, size: int, what: str) -> Tensor:
    """Return rank `rank`'s part of a flat buffer; raise CommError where it does not divide."""
    require_flat(flat, what)
    if flat.numel() % size != 0:
        raise CommError(
            f"{what}: {flat.numel()} elements are not {size} equal shards.",
            remedy="Pad the buffer to a multiple of the ranks.",
        )
    return flat.chunk(size)[rank] if flat.numel() else flat
