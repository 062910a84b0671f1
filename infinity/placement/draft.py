"""A unit on the way to its plan: what is decided, what is left to the planner, and the byte counts that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinity.placement.placement import AUTO, Shares, TierChoice, UnitPlacement
from infinity.placement.request import PlanRequest
from infinity.placement.sizes import UnitSize
from infinity.states import Tier


@dataclass(frozen=True, slots=True)
class Draft:
    """Tiers of one unit; None is undecided and counts as NVMe."""

    unit: UnitSize
    params: Tier | None
    grads: Tier | None
    cpu_tiles: tuple[int, ...]
    has_free_tiles: bool  # the other tiles are undecided, not asked to be on NVMe
    cpu_state_bytes: int
    nvme_state_bytes: int
    largest_tile_bytes: int
    waiting_bytes: int  # its gradient, or its fp32 sums

    @property
    def has_nvme_tiles(self) -> bool:
        return len(self.cpu_tiles) < self.unit.num_tiles

    def stays_on(self, compute_tier: Tier) -> bool:
        """Return whether the whole weights are on the compute tier for good."""
        return self.params is compute_tier and not self.unit.gathers_weights

    def with_tiles(self, cpu_tiles: tuple[int, ...]) -> Draft:
        """Return the draft with these tiles resident."""
        num_bytes = sum(self.unit.tile_bytes[tile] for tile in cpu_tiles)
        return replace(
            self,
            cpu_tiles=tuple(sorted(cpu_tiles)),
            cpu_state_bytes=num_bytes,
            nvme_state_bytes=self.unit.state_bytes - num_bytes,
        )


def draft_unit(unit: UnitSize, asked: UnitPlacement, request: PlanRequest) -> Draft:
    """Return what the placement decides.

    "gpu" means CPU memory on a machine without a GPU, and for gradients and optimizer state on every machine: the CPU
    updates them. It does so for the parts of weights that every use gathers, too. Where a stage leaves weights whole on
    every rank, they stay on the compute tier.
    """
    compute = request.compute_tier
    stays = unit.is_root or (request.num_ranks > 1 and not unit.gathers_weights)
    draft = Draft(
        unit=unit,
        params=compute if stays else _tier(asked.params, Tier.CPU if unit.gathers_weights else compute),
        grads=_tier(asked.grads, Tier.CPU),
        cpu_tiles=(),
        has_free_tiles=asked.optim == AUTO,
        cpu_state_bytes=0,
        nvme_state_bytes=unit.state_bytes,
        largest_tile_bytes=max(unit.tile_bytes, default=0),
        waiting_bytes=request.waiting_bytes(unit),
    )
    if not draft.waiting_bytes:  # nothing to train, nothing waits
        draft = replace(draft, grads=Tier.CPU)
    return draft if asked.optim == AUTO else _with_shares(draft, asked.optim)


def spread_order(num_tiles: int) -> tuple[int, ...]:
    """Return the tiles in an order of which every beginning is spread evenly over the unit (bit reversal).

    So the reads of a partly resident unit alternate with tiles that need none.
    """
    num_bits = max(1, (num_tiles - 1).bit_length())
    return tuple(sorted(range(num_tiles), key=lambda tile: int(f"{tile:0{num_bits}b}"[::-1], 2)))


def _tier(asked: TierChoice, nearest: Tier) -> Tier | None:
    if not isinstance(asked, Tier):
        return None
    return nearest if asked is Tier.GPU else asked


def _with_shares(draft: Draft, shares: Shares) -> Draft:
    num_tiles, asked = draft.unit.num_tiles, dict(shares)
    num_resident = round((asked.get(Tier.GPU, 0.0) + asked.get(Tier.CPU, 0.0)) * num_tiles)
    return draft.with_tiles(spread_order(num_tiles)[:num_resident])
