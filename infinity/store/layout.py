"""What a unit's shard looks like: sections, segments and tiles as frozen values; no torch, no I/O.

A unit's parameters form one flat space per (trainable, dtype), a *section*, in which every parameter starts at a multiple
of 64 elements. A section is padded so that it splits into `world_size` equal parts; each rank's part is its shard. Where a
rank has the whole unit (`whole_layout`) its sections are padded alike, so that parts and whole lie over each other.
Trainable sections have optimizer state, cut into *tiles*, the quantum of I/O. Padding belongs to no segment, so nothing ever
writes it and it stays zero.

    weights buffer   | section 0 (frozen ...) | section 1 (trainable bf16) | section 2 (trainable fp32) |   bytes
    state elements                            | 0 ......................... | ......... num_state_elements |   elements
    tiles                                     | 0 | 1 | 2 | .. | last(short)| k | k+1 | ..                 |
    one tile's extent                         | master_low | exp_avg | exp_avg_sq | padding to 4 KiB |       (bf16)
                                              | master | exp_avg | exp_avg_sq | padding |                    (fp16)
                                              | exp_avg | exp_avg_sq | padding |                             (fp32)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from infinity.byte_sizes import PAGE_BYTES, round_up

ALIGN_ELEMENTS = 64
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of optimizer state inside a tile's extent."""

    name: str
    dtype: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


_MOMENTS = (Plane("exp_avg", "float32"), Plane("exp_avg_sq", "float32"))
# What a tile holds of the fp32 master, by the dtype of the weights: bf16 weights are its high half, fp16 weights a rounded
# copy of it, fp32 weights the master itself (docs/numerics.md).
MASTER_PLANES = {"bfloat16": Plane("master_low", "int16"), "float16": Plane("master", "float32")}
STATE_PLANES: dict[str, tuple[Plane, ...]] = {
    "bfloat16": (MASTER_PLANES["bfloat16"], *_MOMENTS),
    "float16": (MASTER_PLANES["float16"], *_MOMENTS),
    "float32": _MOMENTS,
}
# The same where a rule of torch makes the update and keeps what else it needs itself: the whole fp32 master, if it is not
# the weights themselves.
MASTERS_ALONE: dict[str, tuple[Plane, ...]] = {
    "bfloat16": (Plane("master", "float32"),),
    "float16": (Plane("master", "float32"),),
    "float32": (),
}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a unit, as the layout needs to know it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int = 0  # index of its optimizer parameter group
    has_moments: bool = True  # tiles hold Adam's moments; False: the master alone (MASTERS_ALONE)

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one parameter inside a section of one rank's shard."""

    parameter: str
    group: int
    offset: int  # first element in the rank's part of the section
    length: int
    parameter_offset: int  # first element in the flattened parameter


@dataclass(frozen=True, slots=True)
class Section:
    """All parameters of a unit that share (trainable, dtype)."""

    trainable: bool
    dtype: str
    unit_elements: int  # over all ranks, padded
    shard_elements: int  # this rank's part
    unit_byte_offset: int  # where the section starts in the gathered weights buffer of the whole unit
    shard_byte_offset: int  # where it starts in this rank's weights buffer
    state_offset: int  # first state element; counts trainable sections only
    parameters: tuple[tuple[str, int, int], ...]  # (name, first element in the whole unit's section, numel)
    segments: tuple[Segment, ...]  # this rank's runs, ascending
    has_moments: bool = True

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def planes(self) -> tuple[Plane, ...]:
        if not self.trainable:
            return ()
        return STATE_PLANES[self.dtype] if self.has_moments else MASTERS_ALONE[self.dtype]

    @property
    def master_plane(self) -> Plane | None:
        """The plane with what the weights do not say of the fp32 master; None where they say all or are frozen."""
        return next((plane for plane in self.planes if plane.name in ("master", "master_low")), None)

    @property
    def has_whole_masters(self) -> bool:
        """Whether tiles hold whole fp32 masters, of which the weights are copies rounded to nearest even."""
        return self.master_plane is not None and self.master_plane.name == "master"


@dataclass(frozen=True, slots=True)
class Tile:
    """A fixed-size piece of a shard's optimizer state."""

    shard: int
    index: int  # within the shard
    section: int
    offset: int  # first element within the rank's part of the section
    num_elements: int
    state_offset: int  # first state element of the shard (gradients are indexed by it)
    planes: tuple[Plane, ...]

    def plane_offset(self, name: str) -> int:
        """Return the byte offset of a plane inside the tile's extent."""
        offset = 0
        for plane in self.planes:
            if plane.name == name:
                return offset
            offset += self.num_elements * plane.element_bytes
        raise KeyError(name)

    @property
    def state_bytes(self) -> int:
        """Bytes of state without padding."""
        return self.num_elements * sum(plane.element_bytes for plane in self.planes)

    @property
    def extent_bytes(self) -> int:
        """Bytes on disk and in a buffer: whole pages."""
        return round_up(self.state_bytes, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One rank's shard of one unit."""

    index: int
    name: str
    specs: tuple[ParameterSpec, ...]
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...]
    unit_weight_bytes: int  # the gathered unit, whole pages
    shard_weight_bytes: int  # this rank's part, whole pages
    num_state_elements: int

    def grad_bytes(self, grad_element_bytes: int) -> int:
        """Bytes of this shard's gradient in whole pages; element i is the gradient of state element i."""
        return round_up(self.num_state_elements * grad_element_bytes, PAGE_BYTES)

    def spec(self, parameter: str) -> ParameterSpec:
        return next(spec for spec in self.specs if spec.name == parameter)


def shard_layout(
    index: int, name: str, specs: Sequence[ParameterSpec], *, tile_elements: int, world_size: int = 1, rank: int = 0
) -> ShardLayout:
    """Lay out the unit's parameters and return the given rank's part.

    Parameters are ordered by (trainable, dtype, group), then as given. `tile_elements` is a multiple of 64.
    """
    return _layout(index, name, specs, tile_elements, world_size, rank)


def whole_layout(
    index: int, name: str, specs: Sequence[ParameterSpec], *, tile_elements: int, world_size: int = 1
) -> ShardLayout:
    """Return the layout of a rank that has all parts, by rank section by section; else as `shard_layout`."""
    return _layout(index, name, specs, tile_elements, world_size, None)


def _layout(
    index: int, name: str, specs: Sequence[ParameterSpec], tile_elements: int, world_size: int, rank: int | None
) -> ShardLayout:
    ordered = sorted(specs, key=lambda spec: (spec.trainable, spec.dtype, spec.group))
    sections: list[Section] = []
    unit_bytes = shard_bytes = state_offset = 0
    for (trainable, dtype), members in groupby(ordered, key=lambda spec: (spec.trainable, spec.dtype)):
        section = _section(tuple(members), trainable, dtype, unit_bytes, shard_bytes, state_offset, world_size, rank)
        sections.append(section)
        unit_bytes += section.unit_elements * section.element_bytes
        shard_bytes += section.shard_elements * section.element_bytes
        state_offset += section.shard_elements if trainable else 0
    return ShardLayout(
        index=index, name=name, specs=tuple(specs), sections=tuple(sections),
        tiles=_tiles(index, sections, tile_elements),
        unit_weight_bytes=round_up(unit_bytes, PAGE_BYTES), shard_weight_bytes=round_up(shard_bytes, PAGE_BYTES),
        num_state_elements=state_offset,
    )  # fmt: skip


def _section(
    members: tuple[ParameterSpec, ...], trainable: bool, dtype: str, unit_bytes: int, shard_bytes: int,
    state_offset: int, world_size: int, rank: int | None,
) -> Section:  # fmt: skip
    placed, position = [], 0
    for spec in members:
        placed.append((spec.name, position, spec.numel))
        position = round_up(position + spec.numel, ALIGN_ELEMENTS)
    part_elements = round_up(-(-position // world_size), ALIGN_ELEMENTS)
    unit_elements = part_elements * world_size
    first, shard_elements = (0, unit_elements) if rank is None else (rank * part_elements, part_elements)
    groups = {spec.name: spec.group for spec in members}
    segments = []
    for parameter, start, numel in placed:
        begin, end = max(start, first), min(start + numel, first + shard_elements)
        if begin < end:
            segments.append(Segment(parameter, groups[parameter], begin - first, end - begin, begin - start))
    return Section(
        trainable=trainable, dtype=dtype, unit_elements=unit_elements, shard_elements=shard_elements,
        unit_byte_offset=unit_bytes, shard_byte_offset=shard_bytes, state_offset=state_offset,
        parameters=tuple(placed), segments=tuple(segments), has_moments=all(spec.has_moments for spec in members),
    )  # fmt: skip


def _tiles(shard: int, sections: Sequence[Section], tile_elements: int) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    for number, section in enumerate(sections):
        if not section.planes:
            continue
        for offset in range(0, section.shard_elements, tile_elements):
            length = min(tile_elements, section.shard_elements - offset)
            tiles.append(Tile(shard, len(tiles), number, offset, length, section.state_offset + offset, section.planes))
    return tuple(tiles)


def tile_segments(section: Section, tile: Tile) -> tuple[Segment, ...]:
    """Return the tile's intersections with the section's segments; `offset` counts from the tile's first element."""
    pieces = []
    for segment in section.segments:
        begin = max(segment.offset, tile.offset)
        end = min(segment.offset + segment.length, tile.offset + tile.num_elements)
        if begin < end:
            skipped = begin - segment.offset
            pieces.append(
                Segment(
                    segment.parameter, segment.group, begin - tile.offset, end - begin, segment.parameter_offset + skipped
                )
            )
    return tuple(pieces)
