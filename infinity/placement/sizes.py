"""What the planner knows of a unit: names and byte counts, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitSize:
    """One unit as one rank sees it; bytes are whole pages, as the shard layout gives them."""

    name: str
    parameter_names: tuple[str, ...]  # full names, frozen ones too
    weight_bytes: int  # this rank's part of the compute weights
    gathered_weight_bytes: int  # the whole unit's
    num_state_elements: int  # trainable elements whose optimizer state this rank has, padded
    num_waiting_elements: int  # of the finished gradient that waits on this rank, padded
    num_gradient_elements: int  # the whole unit's trainable elements, padded
    tile_bytes: tuple[int, ...]  # the extent of each tile of optimizer state
    visits: int = 1  # calls in one micro-batch; tied weights count each group of calls
    kept_bytes: int = 0  # what autograd keeps of one micro-batch when the unit is not rerun
    is_root: bool = False  # parameters of no unit: their weights always stay on the compute tier
    is_split: bool = False  # this rank owns its part alone: state, finished gradient, and the weights of that
    gathers_weights: bool = False  # so every use of the weights collects those of the other ranks
    gather_bytes: int = 0  # what that moves: the whole unit's weights, without the padding to pages

    @property
    def num_tiles(self) -> int:
        return len(self.tile_bytes)

    @property
    def state_bytes(self) -> int:
        return sum(self.tile_bytes)
