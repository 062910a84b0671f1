"""One parameter's part of a shard's arrays: read and written run by run, one tile at a time. And which part who has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.memory.arena import Buffer
from infinity.store.layout import ALIGN_ELEMENTS, Section, Segment, ShardLayout, Tile, shard_layout, tile_segments
from infinity.store.store import Store
from infinity.store.tiles import TileLease
from infinity.zero.shard import TORCH_DTYPES

PLANE_DTYPES = {"int16": torch.int16, "float32": torch.float32}


def section_of(layout: ShardLayout, parameter: str) -> Section:
    """Return the section of the shard that holds the parameter."""
    return next(section for section in layout.sections if parameter in {name for name, _, _ in section.parameters})


def runs_of(layout: ShardLayout, parameter: str) -> tuple[Segment, ...]:
    """Return this rank's runs of the parameter in its section, ascending."""
    return tuple(segment for segment in section_of(layout, parameter).segments if segment.parameter == parameter)


def num_parts(layout: ShardLayout) -> int:
    """Return over how many ranks the unit is split; 1 where each has the whole."""
    sizes = [section for section in layout.sections if section.shard_elements]
    return max((section.unit_elements // section.shard_elements for section in sizes), default=1)


def part_of(layout: ShardLayout, rank: int) -> ShardLayout:
    """Return another rank's part of a unit of which `layout` is one: equal sections and tiles, with runs of its own."""
    return shard_layout(
        layout.index, layout.name, layout.specs,
        tile_elements=max((tile.num_elements for tile in layout.tiles), default=ALIGN_ELEMENTS),
        world_size=num_parts(layout), rank=rank,
    )  # fmt: skip


def weights_of(layout: ShardLayout, section: Section, weights: Buffer) -> torch.Tensor:
    """Return a section's elements in the buffer of the shard's weights, 1-D; the section's runs are offsets in it."""
    flat = weights.tensor(torch.uint8, layout.shard_weight_bytes)[section.shard_byte_offset :]
    return flat[: section.shard_elements * section.element_bytes].view(TORCH_DTYPES[section.dtype])


def local_elements(layout: ShardLayout, parameter: str) -> int:
    """Return how many elements of the parameter this rank owns."""
    return sum(run.length for run in runs_of(layout, parameter))


def has_plane(layout: ShardLayout, parameter: str, name: str) -> bool:
    """Return whether the parameter has such an array of optimizer state: none where it is frozen."""
    return any(plane.name == name for plane in section_of(layout, parameter).planes)


def read_plane(store: Store, layout: ShardLayout, parameter: str, name: str) -> torch.Tensor:
    """Return this rank's elements of one plane of the parameter's state, 1-D, in the plane's dtype."""
    plane = next(plane for plane in section_of(layout, parameter).planes if plane.name == name)
    found = torch.empty(local_elements(layout, parameter), dtype=PLANE_DTYPES[plane.dtype])
    position = 0
    for tile, pieces in _tiles_with(layout, parameter):
        with leased(store, tile) as lease:
            values = lease.buffer.tensor(PLANE_DTYPES[plane.dtype], tile.num_elements, tile.plane_offset(name))
            for piece in pieces:
                found[position : position + piece.length] = values[piece.offset : piece.offset + piece.length]
                position += piece.length
    return found


def write_plane(store: Store, layout: ShardLayout, parameter: str, name: str, values: torch.Tensor) -> None:
    """Make `values`, as `read_plane` returns them, the parameter's; pending updates have been made."""
    position = 0
    for tile, pieces in _tiles_with(layout, parameter):
        lease = store.fetch_tile(tile).wait()
        into = lease.buffer.tensor(values.dtype, tile.num_elements, tile.plane_offset(name))
        for piece in pieces:
            into[piece.offset : piece.offset + piece.length] = values[position : position + piece.length]
            position += piece.length
        store.publish_tile(tile, lease)


@contextmanager
def leased(store: Store, tile: Tile) -> Iterator[TileLease]:
    """Give a tile's bytes to be read for the time of the block, which may end early."""
    lease = store.fetch_tile(tile).wait()
    try:
        yield lease
    finally:
        lease.release()


def _tiles_with(layout: ShardLayout, parameter: str) -> Iterator[tuple[Tile, list[Segment]]]:
    for tile in layout.tiles:
        pieces = [piece for piece in tile_segments(layout.sections[tile.section], tile) if piece.parameter == parameter]
        if pieces:
            yield tile, pieces
