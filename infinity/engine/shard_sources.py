"""What a checkpoint holds of an engine: units that give their tensors tile by tile, from every rank, and the buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.checkpoint.reader import Checkpoint
from infinity.checkpoint.sources import HostData
from infinity.checkpoint.specs import BUFFER, WEIGHT, TensorSpec, tensor_name
from infinity.engine.exchange import Exchange
from infinity.engine.masters import held
from infinity.engine.planes import PLANE_DTYPES, leased, num_parts, part_of, section_of, weights_of
from infinity.memory.arena import Buffer
from infinity.store.layout import ShardLayout, Tile, tile_segments
from infinity.store.store import Store
from infinity.zero.shard import Shard
from infinity.zero.weights import Weights


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The tensors of one unit, whole on every rank: all of them run through `pieces` together."""

    shard: Shard
    store: Store
    weights: Weights
    exchange: Exchange

    @property
    def name(self) -> str:
        return self.shard.layout.name

    @property
    def specs(self) -> Sequence[TensorSpec]:
        found = []
        for spec in self.shard.layout.specs:
            found.append(TensorSpec(tensor_name(WEIGHT, spec.name), spec.dtype, spec.shape))
            section = section_of(self.shard.layout, spec.name)
            found += [TensorSpec(tensor_name(plane.name, spec.name), plane.dtype, spec.shape) for plane in section.planes]
        return found

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        """Yield the weights, then tile by tile what each rank has there; a rank reads its next tile while others give."""
        layout = self.shard.layout
        for spec in layout.specs:
            with held(self.weights, self.shard, spec) as weight:
                yield tensor_name(WEIGHT, spec.name), 0, weight.reshape(-1)
        parts = [layout] if num_parts(layout) == 1 else [part_of(layout, rank) for rank in range(num_parts(layout))]
        is_split = len(parts) > 1
        room = torch.empty(max((tile.state_bytes for tile in layout.tiles if is_split), default=0), dtype=torch.uint8)
        for tile in layout.tiles:
            with leased(self.store, tile) as lease:
                own = lease.buffer.tensor(torch.uint8, tile.state_bytes)
                for rank, part in enumerate(parts):
                    state = room[: tile.state_bytes] if is_split and rank != self.exchange.group.rank else own
                    if is_split:
                        self.exchange.broadcast(state, source=rank, what=f"tile {tile.index} of {layout.name}")
                    yield from _pieces_of(part, tile, state)


@dataclass(frozen=True, slots=True)
class BufferSource:
    """The module's buffers for a checkpoint."""

    module: nn.Module

    @property
    def name(self) -> str:
        return "buffers"

    @property
    def specs(self) -> Sequence[TensorSpec]:
        return [
            TensorSpec(tensor_name(BUFFER, name), str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
            for name, buffer in self.module.named_buffers()
        ]

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        for name, buffer in self.module.named_buffers():
            yield tensor_name(BUFFER, name), 0, buffer.detach().cpu().contiguous().view(-1)


def load_shard(checkpoint: Checkpoint, layout: ShardLayout, store: Store, staging: Buffer) -> None:
    """Read what this rank has of a unit into its tiers. `staging` has room for its weights."""
    weights = store.weights(layout.index) or staging
    for section in layout.sections:
        elements = weights_of(layout, section, weights)
        for piece in section.segments:
            into = elements[piece.offset : piece.offset + piece.length]
            checkpoint.read(piece.parameter, WEIGHT, piece.parameter_offset, piece.length, into)
    store.publish_weights(layout.index, weights).wait()
    for tile in layout.tiles:
        lease = store.new_tile(tile)
        for plane in tile.planes:
            values = lease.buffer.tensor(PLANE_DTYPES[plane.dtype], tile.num_elements, tile.plane_offset(plane.name))
            for piece in tile_segments(layout.sections[tile.section], tile):
                into = values[piece.offset : piece.offset + piece.length]
                checkpoint.read(piece.parameter, plane.name, piece.parameter_offset, piece.length, into)
        store.publish_tile(tile, lease)


def load_buffers(checkpoint: Checkpoint, module: nn.Module) -> None:
    """Fill the module's buffers that the checkpoint has."""
    stored = dict(checkpoint.specs(BUFFER))
    for name, buffer in module.named_buffers():
        if name in stored:
            into = torch.empty(buffer.numel(), dtype=buffer.dtype)
            checkpoint.read(name, BUFFER, 0, buffer.numel(), into)
            buffer.detach().copy_(into.view(buffer.shape))


def _pieces_of(part: ShardLayout, tile: Tile, state: torch.Tensor) -> Iterator[tuple[str, int, HostData]]:
    """Yield the runs of parameters in one rank's tile; `state` is its bytes."""
    for plane in tile.planes:
        start = tile.plane_offset(plane.name)
        values = state[start : start + tile.num_elements * plane.element_bytes].view(PLANE_DTYPES[plane.dtype])
        for piece in tile_segments(part.sections[tile.section], tile):
            elements = values[piece.offset : piece.offset + piece.length]
            yield tensor_name(plane.name, piece.parameter), piece.parameter_offset, elements
