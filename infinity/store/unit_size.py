"""From the shards of a unit to what the planner knows of it: what one rank has of each model state. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind
from infinity.store.layout import ALIGN_ELEMENTS, STATE_PLANES, ParameterSpec, ShardLayout, shard_layout


def tile_elements_of(tile_bytes: int, dtype: str) -> int:
    """Return the elements of the largest tile that has at most `tile_bytes` of state for weights of this dtype."""
    element_bytes = sum(plane.element_bytes for plane in STATE_PLANES[dtype])
    return max(ALIGN_ELEMENTS, tile_bytes // element_bytes // ALIGN_ELEMENTS * ALIGN_ELEMENTS)


def stage_layouts(
    name: str, specs: Sequence[ParameterSpec], *, tile_elements: int, stage: int, num_ranks: int, is_root: bool = False
) -> dict[StateKind, ShardLayout]:
    """Return how one rank lays out each model state of a unit: its part where the stage partitions it, else the whole.

    Weights of no unit stay whole on every rank.
    """
    whole = shard_layout(0, name, specs, tile_elements=tile_elements)
    if num_ranks == 1:
        return dict.fromkeys(StateKind, whole)
    part = shard_layout(0, name, specs, tile_elements=tile_elements, world_size=num_ranks)
    kept_whole = {StateKind.PARAM} if is_root else set()
    return {kind: part if is_partitioned(stage, kind) and kind not in kept_whole else whole for kind in StateKind}


def unit_size(
    layouts: Mapping[StateKind, ShardLayout], *, visits: int = 1, kept_bytes: int = 0, is_root: bool = False
) -> UnitSize:
    """Return the size of a unit whose model states are laid out so on this rank; the fields are those of UnitSize."""
    weights = layouts[StateKind.PARAM]
    return UnitSize(
        name=weights.name,
        parameter_names=tuple(spec.name for spec in weights.specs),
        weight_bytes=weights.shard_weight_bytes,
        gathered_weight_bytes=weights.unit_weight_bytes,
        num_state_elements=layouts[StateKind.OPTIM].num_state_elements,
        num_waiting_elements=layouts[StateKind.GRAD].num_state_elements,
        num_gradient_elements=sum(section.unit_elements for section in weights.sections if section.trainable),
        tile_bytes=tuple(tile.extent_bytes for tile in layouts[StateKind.OPTIM].tiles),
        visits=visits,
        kept_bytes=kept_bytes,
        is_root=is_root,
    )
