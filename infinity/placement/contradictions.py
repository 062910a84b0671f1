"""What a request may not ask for, whatever the budgets are."""

from __future__ import annotations

from infinity.errors import ConfigError
from infinity.placement.draft import Draft
from infinity.placement.request import PlanRequest
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier


def require_consistent(request: PlanRequest, drafts: tuple[Draft, ...]) -> None:
    """Raise ConfigError for a placement that contradicts the stage or the machine, and for impossible numbers of slots."""
    if (misplaced := weights_off_the_compute_tier(request)) is not None:
        raise misplaced
    forced = [
        draft.unit.name
        for draft in drafts
        if Tier.NVME in (draft.params, draft.grads) or (draft.has_nvme_tiles and not draft.has_free_tiles)
    ]
    if forced and not request.has_nvme:
        raise ConfigError(
            f"Unit {forced[0]!r} is to live on NVMe, but no directory is given.",
            remedy="Give one with --nvme DIR or infinity.nvme.",
        )
    if request.num_weight_slots < 1 or not 1 <= request.min_tile_slots <= request.max_tile_slots:
        raise ConfigError(
            f"{request.num_weight_slots} weight slots and {request.min_tile_slots} to {request.max_tile_slots} tile slots "
            "are no numbers of slots.",
            remedy="Set infinity.weight_slots and infinity.tile_slots to 2 or more.",
        )


def weights_off_the_compute_tier(request: PlanRequest) -> ConfigError | None:
    """Return the error for weights that are asked off the compute tier at a stage where every rank has them all.

    Each rank would move all of them: with several ranks weights leave the compute tier in parts, which stage 3 makes.
    """
    if request.num_ranks == 1 or is_partitioned(request.stage, StateKind.PARAM):
        return None
    for unit, asked in zip(request.units, request.placement.resolve(request.units), strict=True):
        if unit.is_root or not isinstance(asked.params, Tier):
            continue
        if asked.params not in (Tier.GPU, request.compute_tier):
            return ConfigError(
                f"Unit {unit.name!r} is to have its weights on {asked.params.value}, but in stage {request.stage} each of "
                f"{request.num_ranks} ranks computes with all of them where they are.",
                remedy="Choose --stage 3, which partitions weights, or leave offload_param (--offload-params) at auto.",
            )
    return None
