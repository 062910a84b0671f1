"""One tile's update: its place in the life of an update, and its segments given to the kernel by address."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from infinity.optim.hyper import AdamHyper, UpdateStep
from infinity.optim.kernel import AdamArrays, AdamKernel, MasterFormat
from infinity.states import Lifecycle
from infinity.store.layout import ELEMENT_BYTES, Segment, ShardLayout, Tile, tile_segments

_MASTER_FORMATS = {
    "bfloat16": MasterFormat.SPLIT_BF16,
    "float16": MasterFormat.FP32_OUT_FP16,
    "float32": MasterFormat.FP32,
}


class UpdateState(Enum):
    """How far the update of a tile is."""

    WAITING = "waiting"  # its bytes are in the store; it holds no slot
    READING = "reading"  # state and gradient are coming into slots
    COMPUTING = "computing"  # in memory; the weights buffer is being changed
    WRITING = "writing"  # given to the store, which frees the slot when it is written
    DONE = "done"


UPDATE_MOVES = {
    UpdateState.WAITING: (UpdateState.READING,),
    UpdateState.READING: (UpdateState.COMPUTING,),
    UpdateState.COMPUTING: (UpdateState.WRITING,),
    UpdateState.WRITING: (UpdateState.DONE,),
    UpdateState.DONE: (),
}


def update_lifecycle(tile: Tile) -> Lifecycle[UpdateState]:
    """Return the lifecycle of a new update of `tile`."""
    return Lifecycle(f"update of tile {tile.index} of shard {tile.shard}", UpdateState.WAITING, UPDATE_MOVES)


def touched_tiles(layout: ShardLayout, step: UpdateStep) -> tuple[Tile, ...]:
    """Return the tiles that hold state of a parameter that `step` touches."""
    return tuple(tile for tile in layout.tiles if any(True for _ in _touched_segments(layout, tile, step)))


def compute_tile(
    kernel: AdamKernel, layout: ShardLayout, tile: Tile, step: UpdateStep, *, state: int, weights: int, grad: int
) -> None:
    """Update the touched segments of a tile in place; untouched ones and padding keep every bit.

    `state` is the address of the tile's extent, `weights` that of the shard's weights buffer, `grad` that of the gradient
    of the tile's first element.
    """
    section = layout.sections[tile.section]
    master = _MASTER_FORMATS[section.dtype]
    planes = {plane.name: state + tile.plane_offset(plane.name) for plane in tile.planes}
    first_weight = weights + section.shard_byte_offset + tile.offset * section.element_bytes
    for segment, hyper in _touched_segments(layout, tile, step):
        weight = first_weight + segment.offset * section.element_bytes
        is_copy = master is MasterFormat.FP32_OUT_FP16  # of the master, which the tile holds whole
        arrays = AdamArrays(
            weights=planes["master"] + segment.offset * ELEMENT_BYTES["float32"] if is_copy else weight,
            exp_avg=planes["exp_avg"] + segment.offset * ELEMENT_BYTES["float32"],
            exp_avg_sq=planes["exp_avg_sq"] + segment.offset * ELEMENT_BYTES["float32"],
            grad=grad + segment.offset * ELEMENT_BYTES[step.grad_dtype],
            low=planes["master_low"] + segment.offset * ELEMENT_BYTES["int16"] if "master_low" in planes else 0,
            out=weight if is_copy else 0,
        )
        kernel.adam_update(master, step.grad_dtype, segment.length, arrays, hyper, step.coefficient)


def _touched_segments(layout: ShardLayout, tile: Tile, step: UpdateStep) -> Iterator[tuple[Segment, AdamHyper]]:
    for segment in tile_segments(layout.sections[tile.section], tile):
        hyper = step.hyper(layout.index, segment)
        if hyper is not None:
            yield segment, hyper
