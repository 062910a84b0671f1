"""How one rank lays out a unit at a stage, and what the planner knows of that. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind
from infinity.store.layout import ALIGN_ELEMENTS, STATE_PLANES, ParameterSpec, ShardLayout, shard_layout, whole_layout


@dataclass(frozen=True, slots=True)
class UnitLayouts:
    """A unit as one rank has it."""

    owned: ShardLayout  # what this rank updates and its store holds: state, finished gradient, and the weights of just that
    whole: ShardLayout  # what is computed with and reduced: every rank's part in turn, section by section
    part: ShardLayout  # this rank's part, also where it owns the whole: what it measures of a gradient
    gathers_weights: bool  # for every use: between two of them this rank has the owned weights alone

    @property
    def reduced_runs(self) -> tuple[slice, ...]:
        """Where the trainable sections lie among the whole unit's state elements: each is the ranks' parts in turn."""
        return tuple(
            slice(section.state_offset, section.state_offset + section.unit_elements)
            for section in self.whole.sections
            if section.trainable and section.unit_elements
        )

    @property
    def is_split(self) -> bool:
        """Whether other ranks own parts that this one does not."""
        return self.owned is not self.whole


def undivided(whole: ShardLayout) -> UnitLayouts:
    """Return the layouts of the only rank."""
    return UnitLayouts(whole, whole, whole, gathers_weights=False)


def unit_layouts(
    index: int,
    name: str,
    specs: Sequence[ParameterSpec],
    *,
    tile_elements: int,
    stage: int,
    num_ranks: int,
    rank: int = 0,
    is_root: bool = False,
    kept_elements: int = 0,
) -> UnitLayouts:
    """Return how one rank lays out a unit: its part of what the stage partitions, else the whole.

    Weights of no unit stay whole on every rank, and so do those of a unit without a parameter of more than `kept_elements`.
    """
    whole = whole_layout(index, name, specs, tile_elements=tile_elements, world_size=num_ranks)
    if num_ranks == 1:
        return undivided(whole)
    part = shard_layout(index, name, specs, tile_elements=tile_elements, world_size=num_ranks, rank=rank)
    return UnitLayouts(
        owned=part if is_partitioned(stage, StateKind.OPTIM) else whole,
        whole=whole,
        part=part,
        gathers_weights=is_partitioned(stage, StateKind.PARAM)
        and not is_root
        and any(spec.numel > kept_elements for spec in specs),
    )


def tile_elements_of(tile_bytes: int, dtype: str) -> int:
    """Return the elements of the largest tile that has at most `tile_bytes` of state for weights of this dtype."""
    element_bytes = sum(plane.element_bytes for plane in STATE_PLANES[dtype])
    return max(ALIGN_ELEMENTS, tile_bytes // element_bytes // ALIGN_ELEMENTS * ALIGN_ELEMENTS)


def unit_size(layouts: UnitLayouts, *, visits: int = 1, kept_bytes: int = 0, is_root: bool = False) -> UnitSize:
    """Return the size of a unit that is laid out so; the fields are those of UnitSize."""
    owned, whole = layouts.owned, layouts.whole
    return UnitSize(
        name=whole.name,
        parameter_names=tuple(spec.name for spec in whole.specs),
        weight_bytes=owned.shard_weight_bytes,
        gathered_weight_bytes=whole.unit_weight_bytes,
        num_state_elements=owned.num_state_elements,
        num_waiting_elements=owned.num_state_elements,
        num_gradient_elements=whole.num_state_elements,
        tile_bytes=tuple(tile.extent_bytes for tile in owned.tiles),
        visits=visits,
        kept_bytes=kept_bytes,
        is_root=is_root,
        is_split=layouts.is_split,
        gathers_weights=layouts.gathers_weights,
        gather_bytes=sum(section.unit_elements * section.element_bytes for section in whole.sections),
    )
