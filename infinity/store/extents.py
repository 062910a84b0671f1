"""Which bytes of which file belong to what: pure arithmetic, done before any file exists; no I/O.

An extent is a run of whole pages in one file. Weights have one extent a shard, gradients one extent a shard, optimizer state
one extent a tile. Where fp32 sums of a gradient wait before it is finished, its extent has room for all of them, one behind
the other, and the finished gradient takes the place of the first. Extents of one kind go round over the directories, each to
the one that lags most behind its share, so that equal directories are filled in turn, consecutive tiles are read from
different disks, and none is ever ahead of its share by more than an extent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.states import Tier
from infinity.store.layout import ELEMENT_BYTES, ShardLayout, Tile
from infinity.store.shares import ShardShares
from infinity.store.stripes import Stripe, share_out

Shards = Sequence[tuple[ShardLayout, ShardShares]]


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of whole pages in one file."""

    file: int  # index of the file, which is that of its directory
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardExtents:
    """The extents of one shard; None where the bytes are not in these files, or where there are none."""

    weights: Extent | None
    tiles: tuple[Extent | None, ...]
    gradients: Extent | None

    def __iter__(self) -> Iterator[Extent]:
        """Yield the extents that exist: weights, tiles, gradients."""
        return (extent for extent in (self.weights, *self.tiles, self.gradients) if extent is not None)


@dataclass(frozen=True, slots=True)
class ExtentTable:
    """Every extent of a store, the exact size of each file, and what the table follows from beside the shards."""

    shards: tuple[ShardExtents, ...]
    file_bytes: tuple[int, ...]
    stripes: tuple[Stripe, ...]  # one a file


def plan_extents(shards: Shards, *, grad_element_bytes: int, stripes: Sequence[Stripe] = (Stripe(1.0),)) -> ExtentTable:
    """Place all that lives on NVMe; `stripes` has one entry a directory.

    A directory takes more than its limit only where no other has room for an extent.
    """
    sizes = [_sizes_of(layout, shares, grad_element_bytes) for layout, shares in shards]
    files = _Files(stripes, share_out(sum(size.num_bytes for size in sizes), stripes))
    placed = [
        ShardExtents(
            weights=files.place("weights", size.weight_bytes),
            tiles=tuple(files.place("tiles", num_bytes) for num_bytes in size.tile_bytes),
            gradients=files.place("gradients", size.gradient_bytes),
        )
        for size in sizes
    ]
    return ExtentTable(tuple(placed), files.ends(), tuple(stripes))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The bytes of one shard that live on NVMe; 0 for what does not."""

    weight_bytes: int
    tile_bytes: tuple[int, ...]
    gradient_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + sum(self.tile_bytes) + self.gradient_bytes


def _sizes_of(layout: ShardLayout, shares: ShardShares, grad_element_bytes: int) -> _Sizes:
    return _Sizes(
        weight_bytes=layout.shard_weight_bytes if shares.params is Tier.NVME else 0,
        tile_bytes=tuple(0 if tile.index in shares.resident_tiles else tile.extent_bytes for tile in layout.tiles),
        gradient_bytes=waiting_bytes(layout, shares, grad_element_bytes) if shares.grads is Tier.NVME else 0,
    )


def sum_bytes(layout: ShardLayout, num_elements: int = 0) -> int:
    """Return the bytes of one fp32 sum of `num_elements`, by default the shard's gradient, in whole pages."""
    return round_up((num_elements or layout.num_state_elements) * ELEMENT_BYTES["float32"], PAGE_BYTES)


def waiting_bytes(layout: ShardLayout, shares: ShardShares, grad_element_bytes: int) -> int:
    """Return the bytes in which a shard's gradient waits, finished or as sums, in whole pages."""
    return max(layout.grad_bytes(grad_element_bytes), shares.num_sums * sum_bytes(layout, shares.num_sum_elements))


def plan_resident_extents(shards: Shards) -> ExtentTable:
    """Place what a checkpoint in place must add, the weights and tiles that live in RAM, in one file."""
    stripes = (Stripe(1.0),)
    file = _Files(stripes, (1.0,))
    placed = []
    for layout, shares in shards:
        weight_bytes = 0 if shares.params is Tier.NVME else layout.shard_weight_bytes
        placed.append(
            ShardExtents(
                weights=file.place("weights", weight_bytes),
                tiles=tuple(
                    file.place("tiles", tile.extent_bytes) if tile.index in shares.resident_tiles else None
                    for tile in layout.tiles
                ),
                gradients=None,
            )
        )
    return ExtentTable(tuple(placed), file.ends(), stripes)


class _Files:
    """The fill of each file, per kind for the balance and in all for the offsets."""

    def __init__(self, stripes: Sequence[Stripe], shares: Sequence[float]) -> None:
        self._limits = [stripe.limit_bytes for stripe in stripes]
        self._shares = tuple(shares)
        self._ends = [0] * len(stripes)
        self._fill = {kind: [0] * len(stripes) for kind in ("weights", "tiles", "gradients")}

    def place(self, kind: str, num_bytes: int) -> Extent | None:
        if not num_bytes:
            return None
        fill = self._fill[kind]
        total = sum(fill) + num_bytes
        file = max(self._with_room(num_bytes), key=lambda index: total * self._shares[index] - fill[index])
        extent = Extent(file, self._ends[file], num_bytes)
        fill[file] += num_bytes
        self._ends[file] += num_bytes
        return extent

    def ends(self) -> tuple[int, ...]:
        return tuple(self._ends)

    def _with_room(self, num_bytes: int) -> Sequence[int]:
        """Return the files with room for so many bytes; all of them where none has."""
        files = range(len(self._ends))
        return [index for index in files if self._has_room(index, num_bytes)] or files

    def _has_room(self, index: int, num_bytes: int) -> bool:
        limit = self._limits[index]
        return limit is None or self._ends[index] + num_bytes <= limit


@dataclass(frozen=True, slots=True)
class GradientWindow:
    """The pages of a shard's gradient that hold one tile's part."""

    offset: int  # first byte in the shard's gradient, at a page boundary
    num_bytes: int  # whole pages
    lead_bytes: int  # bytes in the first page before the tile's first gradient


def gradient_window(tile: Tile, grad_element_bytes: int) -> GradientWindow:
    """Return the pages that cover the gradients of the tile's elements."""
    begin = tile.state_offset * grad_element_bytes
    end = begin + tile.num_elements * grad_element_bytes
    offset = begin // PAGE_BYTES * PAGE_BYTES
    return GradientWindow(offset, round_up(end, PAGE_BYTES) - offset, begin - offset)
