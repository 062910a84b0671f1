"""How the bytes on NVMe are shared out among directories: by weight, as far as each has room. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stripe:
    """One directory's part of everything that is striped."""

    weight: float  # beside the other directories' weights; more than 0
    limit_bytes: int | None = None  # the most that it takes


def share_out(num_bytes: int, stripes: Sequence[Stripe]) -> tuple[float, ...]:
    """Return each directory's share of `num_bytes`; the shares add up to 1.

    What a directory has no room for goes to the others by their weights. Where all together have too little room the
    shares are as if the last of them had enough.
    """
    shares = [0.0] * len(stripes)
    left, rest = list(range(len(stripes))), 1.0
    while left:
        total = sum(stripes[index].weight for index in left)
        for index in left:
            shares[index] = rest * stripes[index].weight / total
        full = [index for index in left if shares[index] > _most(stripes[index], num_bytes)]
        if not full or len(full) == len(left):
            break
        for index in full:
            shares[index] = _most(stripes[index], num_bytes)
            rest -= shares[index]
        left = [index for index in left if index not in full]
    return tuple(shares)


def _most(stripe: Stripe, num_bytes: int) -> float:
    return 1.0 if stripe.limit_bytes is None or num_bytes == 0 else min(1.0, stripe.limit_bytes / num_bytes)
