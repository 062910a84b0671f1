"""The shard layout is an exact partition of the parameters for any world size, rank and tile size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.byte_sizes import PAGE_BYTES
from infinity.store.layout import ALIGN_ELEMENTS, ParameterSpec, shard_layout, tile_segments

# 1, odd, and bytes of n * 512 + {1, 2, 4, 510} whatever the element size.
SIZES = st.one_of(st.sampled_from([1, 2, 3, 63, 64, 65, 127, 255, 256, 257, 511, 513, 514, 516, 1022]), st.integers(1, 3000))


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterSpec]:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=8))
    return [
        ParameterSpec(
            f"p{number}",
            (size,),
            draw(st.sampled_from(["bfloat16", "float16", "float32"])),
            draw(st.booleans()),
            draw(st.integers(0, 2)),
        )
        for number, size in enumerate(sizes)
    ]


@given(parameters(), st.integers(1, 5), st.sampled_from([64, 128, 1024, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_segments_of_all_ranks_partition_every_parameter(specs: list[ParameterSpec], world_size: int, tile: int) -> None:
    """Every element of every parameter is in exactly one segment of one rank, numel < world size included. C13, C15."""
    seen = {spec.name: [0] * spec.numel for spec in specs}
    for rank in range(world_size):
        layout = shard_layout(0, "unit", specs, tile_elements=tile, world_size=world_size, rank=rank)
        for section in layout.sections:
            end = 0
            for segment in section.segments:
                assert segment.offset >= end  # ascending, never overlapping
                end = segment.offset + segment.length
                for element in range(segment.parameter_offset, segment.parameter_offset + segment.length):
                    seen[segment.parameter][element] += 1
            assert end <= section.shard_elements
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(parameters(), st.integers(1, 5), st.data(), st.sampled_from([64, 192, 1024]))
@settings(max_examples=150, deadline=None)
def test_tiles_cut_the_trainable_segments_exactly(
    specs: list[ParameterSpec], world_size: int, data: st.DataObject, tile_elements: int
) -> None:
    """Tiles cover the state once, in order, and their pieces put together are the segments."""
    rank = data.draw(st.integers(0, world_size - 1))
    layout = shard_layout(0, "unit", specs, tile_elements=tile_elements, world_size=world_size, rank=rank)
    position = 0
    for index, tile in enumerate(layout.tiles):
        assert (tile.index, tile.state_offset) == (index, position)
        assert 0 < tile.num_elements <= tile_elements
        position += tile.num_elements
    assert position == layout.num_state_elements
    for number, section in enumerate(layout.sections):
        elements = [
            (piece.parameter, piece.parameter_offset + k, tile.offset + piece.offset + k)
            for tile in layout.tiles
            if tile.section == number
            for piece in tile_segments(section, tile)
            for k in range(piece.length)
        ]
        expected = [
            (segment.parameter, segment.parameter_offset + k, segment.offset + k)
            for segment in section.segments
            for k in range(segment.length)
        ]
        assert elements == (expected if section.trainable else [])


@given(parameters(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_rank_has_the_same_sizes_and_alignment(specs: list[ParameterSpec], world_size: int) -> None:
    """Ranks differ only in their segments, parameters start at 64 elements, and buffers are whole pages. C2."""
    layouts = [shard_layout(0, "u", specs, tile_elements=64, world_size=world_size, rank=rank) for rank in range(world_size)]
    first = layouts[0]
    assert {layout.shard_weight_bytes for layout in layouts} == {first.shard_weight_bytes}
    assert {layout.tiles for layout in layouts} == {first.tiles}
    assert first.shard_weight_bytes % PAGE_BYTES == first.unit_weight_bytes % PAGE_BYTES == 0
    assert first.shard_weight_bytes >= sum(s.shard_elements * s.element_bytes for s in first.sections)
    assert all(start % ALIGN_ELEMENTS == 0 for section in first.sections for _, start, _ in section.parameters)


@pytest.mark.parametrize("remainder", [1, 2, 4, 510])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_byte_sizes_next_to_multiples_of_512_get_whole_pages(remainder: int, dtype: str) -> None:
    """n * 512 + {1, 2, 4, 510} elements: the extent is padded, the logical length is kept apart. C1."""
    spec = ParameterSpec("p", (9 * 512 + remainder,), dtype, True)
    layout = shard_layout(0, "unit", [spec], tile_elements=1024)
    state_bytes = {"bfloat16": 10, "float16": 12, "float32": 8}[dtype]
    assert sum(segment.length for segment in layout.sections[0].segments) == spec.numel
    assert layout.num_state_elements >= spec.numel
    for tile in layout.tiles:
        assert tile.state_bytes == tile.num_elements * state_bytes
        assert tile.extent_bytes % PAGE_BYTES == 0
        assert 0 <= tile.extent_bytes - tile.state_bytes < PAGE_BYTES
