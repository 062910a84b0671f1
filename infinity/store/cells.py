"""The cells of a shard: each weight, tile and gradient in RAM or in a swap file, built from the extents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool
from infinity.states import Tier
from infinity.store.checksums import Checking
from infinity.store.commit import checksum_key
from infinity.store.directory import SWAP_NAME
from infinity.store.extents import Extent, ExtentTable, ShardExtents
from infinity.store.layout import ShardLayout
from infinity.store.resident import NoBytes, ResidentBytes
from infinity.store.swap_space import CommitState, SwapSpace
from infinity.store.swapped import SwapIo, SwappedBytes
from infinity.store.tiles import ResidentTile, SwappedTile

BytesCell = SwappedBytes | ResidentBytes | NoBytes


@dataclass(frozen=True, slots=True)
class ShardCells:
    """Where the states of one shard are."""

    layout: ShardLayout
    weights: BytesCell
    tiles: tuple[ResidentTile | SwappedTile, ...]
    gradients: BytesCell

    def swapped_tiles(self) -> Iterator[SwappedTile]:
        """Yield the tiles that have an extent."""
        return (tile for tile in self.tiles if isinstance(tile, SwappedTile))

    def swapped(self) -> Iterator[SwappedBytes]:
        """Yield everything that has an extent."""
        for cell in (self.weights, *(tile.content for tile in self.swapped_tiles()), self.gradients):
            if isinstance(cell, SwappedBytes):
                yield cell


@dataclass(frozen=True, slots=True)
class CellParts:
    """What the cells of every shard share."""

    io: SwapIo
    space: SwapSpace
    pool: BufferPool | None
    ledger: Ledger
    pin: bool  # weights and gradients
    checking: Checking | None
    committed_checksums: Mapping[str, int]  # by `checksum_key`, of the checkpoint in place that is taken over
    resources: ExitStack

    def arena(self, owner: str, num_bytes: int, *, pin: bool) -> Buffer:
        return self.resources.enter_context(
            open_arena(num_bytes, ledger=self.ledger, tier=Tier.CPU, owner=owner, pin=pin)
        ).buffer

    def place(self, extent: Extent | None, num_bytes: int, owner: str, name: str) -> BytesCell:
        """Weights or gradients: in their extent if there is one, else in an arena."""
        if extent is not None:
            return self.swapped(extent, f"{owner} of {name}", spilled=owner == "gradients")
        return ResidentBytes(self.arena(owner, num_bytes, pin=self.pin)) if num_bytes else NoBytes()

    def swapped(self, extent: Extent, name: str, *, spilled: bool = False) -> SwappedBytes:
        # Gradients are no part of a checkpoint: they hold nothing in one that is adopted and destroy none when written.
        committed = self.space.state is CommitState.STANDING and not spilled
        return SwappedBytes(
            self.io, extent, name, written=committed,
            before_write=_nothing if spilled else self.space.consume,
            counters=("gradient_spill_bytes",) if spilled else (), checking=self.checking,
            checksum=None if spilled else self.committed_checksums.get(checksum_key(SWAP_NAME, extent)),
        )  # fmt: skip


def build_cells(layout: ShardLayout, extents: ShardExtents, waiting_bytes: int, parts: CellParts) -> ShardCells:
    resident_bytes = sum(
        tile.extent_bytes for tile, extent in zip(layout.tiles, extents.tiles, strict=True) if extent is None
    )
    arena = parts.arena("optimizer state", resident_bytes, pin=False) if resident_bytes else None  # never copied to a GPU
    tiles: list[ResidentTile | SwappedTile] = []
    position = 0
    for tile, extent in zip(layout.tiles, extents.tiles, strict=True):
        name = _tile_name(layout, tile.index)
        if extent is not None and parts.pool is not None:
            tiles.append(SwappedTile(parts.swapped(extent, name), parts.pool, name))
        elif arena is not None:
            tiles.append(ResidentTile(arena.part(position, tile.extent_bytes)))
            position += tile.extent_bytes
    return ShardCells(
        layout=layout,
        weights=parts.place(extents.weights, layout.shard_weight_bytes, "weights", layout.name),
        tiles=tuple(tiles),
        gradients=parts.place(extents.gradients, waiting_bytes, "gradients", layout.name),
    )


def resident_buffers(table: ExtentTable, cells: Sequence[ShardCells]) -> Iterator[tuple[str, Extent, Buffer]]:
    """Yield what lives in RAM: its name, where in `resident.bin` it goes, and where it is."""
    for extents, shard in zip(table.shards, cells, strict=True):
        if extents.weights is not None and isinstance(shard.weights, ResidentBytes):
            yield _weights_name(shard.layout), extents.weights, shard.weights.buffer
        for number, (extent, tile) in enumerate(zip(extents.tiles, shard.tiles, strict=True)):
            if extent is not None and isinstance(tile, ResidentTile):
                yield _tile_name(shard.layout, number), extent, tile.buffer


def _weights_name(layout: ShardLayout) -> str:
    return f"weights of {layout.name}"


def _tile_name(layout: ShardLayout, number: int) -> str:
    return f"tile {number} of {layout.name}"


def _nothing() -> None:
    """What a write of gradients must do first."""
