"""Extents are disjoint whole pages that fill each file exactly, over any number of directories."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import in_memory, odd_layouts

from infinity.byte_sizes import PAGE_BYTES
from infinity.states import Tier
from infinity.store.extents import (
    ExtentTable,
    Shards,
    gradient_window,
    plan_extents,
    plan_resident_extents,
    sum_bytes,
)
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.shares import ShardShares
from infinity.store.stripes import Stripe


@st.composite
def any_shards(draw: st.DrawFn) -> Shards:
    shards = []
    for index in range(draw(st.integers(1, 4))):
        specs = [
            ParameterSpec(
                f"p{k}", (draw(st.integers(1, 5000)),), draw(st.sampled_from(["float32", "bfloat16"])), draw(st.booleans())
            )
            for k in range(draw(st.integers(1, 4)))
        ]
        layout = shard_layout(index, f"unit{index}", specs, tile_elements=draw(st.sampled_from([64, 1024])))
        resident = draw(st.frozensets(st.integers(0, max(0, len(layout.tiles) - 1))))
        num_sums = draw(st.integers(0, 3))
        shards.append((layout, ShardShares(draw(st.sampled_from(Tier)), draw(st.sampled_from(Tier)), resident, num_sums)))
    return shards


def assert_fills_the_files(table: ExtentTable) -> None:
    extents = sorted((e.file, e.offset, e.num_bytes) for shard in table.shards for e in shard)
    ends = [0] * len(table.file_bytes)
    for file, offset, num_bytes in extents:
        assert offset == ends[file]  # no overlap and no gap
        assert num_bytes > 0
        assert num_bytes % PAGE_BYTES == 0
        ends[file] = offset + num_bytes
    assert tuple(ends) == table.file_bytes


@given(any_shards(), st.integers(1, 4), st.sampled_from([2, 4]))
@settings(max_examples=150, deadline=None)
def test_extents_are_disjoint_and_fill_each_file(shards: Shards, num_directories: int, grad_element_bytes: int) -> None:
    """Sizes are known before any file exists, and nothing is lost between two extents."""
    table = plan_extents(shards, grad_element_bytes=grad_element_bytes, stripes=[Stripe(1.0)] * num_directories)
    assert_fills_the_files(table)
    for (layout, shares), extents in zip(shards, table.shards, strict=True):
        for tile, extent in zip(layout.tiles, extents.tiles, strict=True):
            assert (extent is None) == (tile.index in shares.resident_tiles)
            assert extent is None or extent.num_bytes == tile.extent_bytes
        waiting = extents.gradients.num_bytes if extents.gradients else 0
        is_spilled = shares.grads is Tier.NVME and layout.num_state_elements > 0
        assert waiting == (max(shares.num_sums * sum_bytes(layout), layout.grad_bytes(grad_element_bytes)) * is_spilled)


@given(any_shards())
@settings(max_examples=100, deadline=None)
def test_every_weight_and_tile_is_either_swapped_or_resident(shards: Shards) -> None:
    """The swap files and resident.bin together hold every weight and tile once."""
    swapped, resident = plan_extents(shards, grad_element_bytes=2), plan_resident_extents(shards)
    assert_fills_the_files(resident)
    for (layout, _), disk, ram in zip(shards, swapped.shards, resident.shards, strict=True):
        assert (disk.weights is None) != (ram.weights is None)
        assert len(disk.tiles) == len(ram.tiles) == len(layout.tiles)
        assert all((a is None) != (b is None) for a, b in zip(disk.tiles, ram.tiles, strict=True))


def test_equal_tiles_go_round_equal_directories() -> None:
    """Consecutive tiles of one size are on different disks."""
    layout = shard_layout(0, "unit", [ParameterSpec("p", (64 * 1024,), "float32", True)], tile_elements=1024)
    table = plan_extents(
        [(layout, ShardShares(Tier.NVME, Tier.CPU, frozenset()))], grad_element_bytes=2, stripes=[Stripe(1.0)] * 3
    )
    assert [extent.file for extent in table.shards[0].tiles if extent] == [k % 3 for k in range(64)]


def test_a_directory_of_twice_the_weight_gets_twice_the_tiles() -> None:
    """The weight vector is each directory's share."""
    layout = shard_layout(0, "unit", [ParameterSpec("p", (96 * 1024,), "float32", True)], tile_elements=1024)
    shards = [(layout, ShardShares(Tier.CPU, Tier.CPU, frozenset()))]
    table = plan_extents(shards, grad_element_bytes=2, stripes=[Stripe(2.0), Stripe(1.0)])
    assert table.file_bytes[0] == 2 * table.file_bytes[1]


def test_nothing_on_nvme_needs_no_bytes() -> None:
    """A run in RAM has no extents at all."""
    table = plan_extents(in_memory(odd_layouts()), grad_element_bytes=2)
    assert table.file_bytes == (0,)
    assert [list(shard) for shard in table.shards] == [[]] * 4


@given(any_shards(), st.sampled_from([2, 4]))
@settings(max_examples=100, deadline=None)
def test_gradient_windows_cover_their_tile_and_stay_inside(shards: Shards, grad_element_bytes: int) -> None:
    """The window of a tile is whole pages of the shard's gradient around exactly the tile's elements."""
    for layout, _ in shards:
        for tile in layout.tiles:
            window = gradient_window(tile, grad_element_bytes)
            begin = window.offset + window.lead_bytes
            end = begin + tile.num_elements * grad_element_bytes
            assert begin == tile.state_offset * grad_element_bytes
            assert window.offset % PAGE_BYTES == window.num_bytes % PAGE_BYTES == 0
            assert 0 <= window.lead_bytes < PAGE_BYTES
            assert end <= window.offset + window.num_bytes <= layout.grad_bytes(grad_element_bytes)
