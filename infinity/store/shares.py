"""Where a shard's model states live: the part of a placement that the store needs, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.states import Tier


@dataclass(frozen=True, slots=True)
class ShardShares:
    """The tiers of one shard. NVME means an extent in a swap file; GPU and CPU both mean a host arena of the store."""

    params: Tier
    grads: Tier
    resident_tiles: frozenset[int]  # indices of the tiles of optimizer state that stay in RAM
    num_sums: int = 0  # fp32 sums of the gradient that wait, before it is finished, where it then waits itself
    num_sum_elements: int = 0  # of each: the whole unit's where they are summed over ranks later; 0: the shard's
