"""What the user writes into parameters that stay in memory, between steps, becomes their master: it is not half forgotten.

A split bf16 master takes its high half from the weight itself, so that a write would meet the low half of the old value: up
to half a unit in the last place away from what was written, and not a number where zero was. Beside fp16 weights the master
is whole, and the next update would write over them. Writes through torch are seen by the tensor's version; only those
through `parameter.data` have none (docs/decisions.md). Over several ranks each takes what it owns from its own parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.engine.planes import runs_of, section_of, weights_of
from infinity.errors import ModelError
from infinity.store.layout import ParameterSpec, tile_segments
from infinity.store.store import Store
from infinity.zero.shard import TORCH_DTYPES, Residency, Shard


@dataclass(slots=True)
class _Watched:
    """A parameter of the user's module and the memory that it is to stay in."""

    shard: Shard
    spec: ParameterSpec
    parameter: nn.Parameter
    own: torch.Tensor
    version: int

    @property
    def was_written(self) -> bool:
        return self.parameter._version != self.version or self.parameter.data_ptr() != self.own.data_ptr()


class UserWrites:
    """Watches the parameters of resident shards. One thread; nothing may be in flight that uses their tiles."""

    def __init__(self, shards: Sequence[Shard], store: Store) -> None:
        self._store = store
        self._watched = [
            _Watched(shard, spec, parameter, parameter.data, parameter._version)
            for shard in shards
            if shard.residency is Residency.RESIDENT
            for spec in shard.layout.specs
            if (parameter := shard.outside[spec.name]).numel()
        ]

    @property
    def waiting(self) -> bool:
        """Whether anything was written since the last call of `take_in`."""
        return any(watched.was_written for watched in self._watched)

    def take_in(self) -> None:
        """Make every value that was written since the last call the master. Raises ModelError for one of another shape."""
        for watched in self._watched:
            if watched.was_written:
                self._take_in(watched)

    def _take_in(self, watched: _Watched) -> None:
        parameter, spec = watched.parameter, watched.spec
        if parameter.data_ptr() != watched.own.data_ptr():  # it was given other memory, as Module.to does
            if tuple(parameter.shape) != spec.shape:
                raise ModelError(
                    f"Parameter {spec.name} was replaced by one of shape {tuple(parameter.shape)}; it has {spec.shape}.",
                    remedy="Change shapes before infinity.initialize.",
                )
            watched.own.copy_(parameter.data)
            parameter.data = watched.own
        written = watched.own.reshape(-1)
        self._renew_weights(watched.shard, spec, written)
        self._renew_master(watched.shard, spec, written)
        watched.version = parameter._version

    def _renew_weights(self, shard: Shard, spec: ParameterSpec, written: torch.Tensor) -> None:
        """Let what this rank owns of the weights say what was written."""
        in_host_memory = self._store.weights(shard.index)
        if in_host_memory is None:
            return
        elements = weights_of(shard.layout, section_of(shard.layout, spec.name), in_host_memory)
        for run in runs_of(shard.layout, spec.name):
            own = elements[run.offset : run.offset + run.length]
            source = written[run.parameter_offset : run.parameter_offset + run.length]
            if own.data_ptr() != source.data_ptr():  # beside the whole, or on a device of its own memory
                own.copy_(source)

    def _renew_master(self, shard: Shard, spec: ParameterSpec, written: torch.Tensor) -> None:
        """Let what tiles hold of the parameter's master say what was written: nothing more than the weight, or all of it."""
        plane = section_of(shard.layout, spec.name).master_plane
        if plane is None:
            return
        for tile in shard.layout.tiles:
            pieces = [
                piece for piece in tile_segments(shard.layout.sections[tile.section], tile) if piece.parameter == spec.name
            ]
            if not pieces:
                continue
            lease = self._store.fetch_tile(tile).wait()
            master = lease.buffer.tensor(TORCH_DTYPES[plane.dtype], tile.num_elements, tile.plane_offset(plane.name))
            for piece in pieces:
                run = master[piece.offset : piece.offset + piece.length]
                if plane.name == "master_low":
                    run.zero_()
                else:
                    run.copy_(written[piece.parameter_offset : piece.parameter_offset + piece.length])
            self._store.publish_tile(tile, lease)
