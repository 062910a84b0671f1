"""State out of the tiers and back: full parameters, checkpoints, one tile and one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.checkpoint.manifest import CheckpointState, Counters, Fingerprint
from infinity.checkpoint.reader import Checkpoint, open_checkpoint
from infinity.checkpoint.sources import HostData
from infinity.checkpoint.specs import BUFFER, WEIGHT, TensorSpec, tensor_name
from infinity.checkpoint.writer import write_checkpoint
from infinity.engine.in_place import commit_in_place, require_adopted
from infinity.engine.loss_scaler import LossScaler
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.planes import PLANE_DTYPES, leased, read_plane, section_of
from infinity.engine.tags import directory_of, find, note_latest
from infinity.errors import SwapSpaceError
from infinity.memory.arena import Buffer
from infinity.optim.reference import join_master
from infinity.store.layout import MASTER_PLANES, ParameterSpec, Section, ShardLayout, Tile, tile_segments
from infinity.store.store import Store
from infinity.zero.shard import TORCH_DTYPES, Shard
from infinity.zero.weights import Weights


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps were taken, and how many of them skipped."""

    taken: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says beside its tensors."""

    path: Path  # where it is
    steps: StepCounts
    extra: dict[str, object]


class Persistence:
    """Reads and replaces the state of a drained engine. `staging` gives host memory for one shard's weights."""

    def __init__(
        self,
        *,
        module: nn.Module,
        shards: Sequence[Shard],
        store: Store,
        weights: Weights,
        optimizer: Optimizer,
        lr_schedule: LrSchedule,
        loss_scaler: LossScaler,
        precision: str,
        staging: Callable[[int], Buffer],
        adopted: CheckpointState | None,
        cpu_memory_bytes: int,
    ) -> None:
        self._module = module
        self._shards = shards
        self._store = store
        self._weights = weights
        self._optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._loss_scaler = loss_scaler
        self._precision = precision
        self._staging = staging
        self._cpu_memory_bytes = cpu_memory_bytes  # the budget that the layout was planned for
        self._adopted = adopted  # the checkpoint in place whose swap files this store took over

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's fp32 master in order of the shards, on the CPU."""
        for shard in self._shards:
            for spec in shard.layout.specs:
                yield spec.name, self.master(shard, spec)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all of them with the tied names, and the persistent buffers."""
        values = dict(self.full_parameters())
        for alias, name in self._aliases().items():
            values[alias] = values[name]
        values.update({name: buffer.detach().cpu().clone() for name, buffer in _persistent_buffers(self._module)})
        return values

    def save(
        self, directory: Path, tag: str | None, steps: StepCounts, *, extra: dict[str, object], keep: int | None
    ) -> Path:
        """Write one checkpoint and return its path; `latest` then says which tag it has."""
        path = self._save(directory_of(directory, tag), steps, extra, keep)
        note_latest(directory, tag)
        return path

    def _save(self, directory: Path, steps: StepCounts, extra: dict[str, object], keep: int | None) -> Path:
        """Write a copy, or where there is no room for one, let the swap files themselves be the checkpoint."""
        counters = Counters(
            global_step=steps.taken,
            applied_steps=steps.taken - steps.skipped,
            skipped_steps=steps.skipped,
            schedule_position=self._lr_schedule.num_applied_steps,
            parameter_steps=dict(self._optimizer.steps),
        )
        state = CheckpointState(
            fingerprint=self._fingerprint(),
            precision=self._precision,
            counters=counters,
            data_position=extra,  # type: ignore[arg-type]
            rng_state=torch.get_rng_state().numpy().tobytes().hex(),
            loss_scale=self._loss_scaler.record(),
        )
        buffers = _BufferSource(self._module)
        units = [_ShardSource(shard, self._store, self._weights) for shard in self._shards]
        try:
            return write_checkpoint(directory, units, state, buffers=buffers, keep=keep)
        except SwapSpaceError:
            if not self._store.directories:
                raise
        return commit_in_place(self._store, directory, state, buffers=buffers, cpu_memory_bytes=self._cpu_memory_bytes)

    def load(self, path: Path, tag: str | None) -> Restored:
        """Replace the whole state by a checkpoint's; see `tags.find` for which."""
        with open_checkpoint(find(path, tag)) as checkpoint:
            checkpoint.require_match(self._fingerprint())
            state = checkpoint.state
            loss_scale = self._loss_scaler.recorded(state.loss_scale)
            if checkpoint.manifest.swap_files:
                require_adopted(checkpoint, self._adopted)
            else:
                self._weights.forget()
                for shard in self._shards:
                    self._load_shard(checkpoint, shard)
                self._weights.show_resident()
                self._weights.rewind()
            self._load_buffers(checkpoint)
        counters = state.counters
        self._optimizer.steps = dict(counters.parameter_steps)
        self._lr_schedule.num_applied_steps = counters.schedule_position
        self._loss_scaler.state = loss_scale
        if isinstance(state.rng_state, str):
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state.rng_state), dtype=torch.uint8))
        extra = state.data_position if isinstance(state.data_position, dict) else {}
        return Restored(checkpoint.path, StepCounts(counters.global_step, counters.skipped_steps), dict(extra))

    # Parameters

    def master(self, shard: Shard, spec: ParameterSpec) -> torch.Tensor:
        """Return one parameter's fp32 master; its weight where it is frozen."""
        with _held(self._weights, shard, spec) as weight:
            plane = MASTER_PLANES.get(spec.dtype)
            if plane is None or not spec.trainable:
                return weight.to(torch.float32, copy=True)
            if plane.name == "master_low":
                return join_master(weight, read_plane(self._store, shard.layout, spec.name, plane.name).view(weight.shape))
            shape = weight.shape
        return read_plane(self._store, shard.layout, spec.name, plane.name).view(shape)

    # Checkpoints

    def _load_shard(self, checkpoint: Checkpoint, shard: Shard) -> None:
        layout = shard.layout
        buffer = self._store.weights(layout.index) or self._staging(layout.index)
        flat = buffer.tensor(torch.uint8, layout.shard_weight_bytes)
        for section in layout.sections:
            start = section.shard_byte_offset
            elements = flat[start : start + section.shard_elements * section.element_bytes].view(TORCH_DTYPES[section.dtype])
            for piece in section.segments:
                into = elements[piece.offset : piece.offset + piece.length]
                checkpoint.read(piece.parameter, WEIGHT, piece.parameter_offset, piece.length, into)
        self._store.publish_weights(layout.index, buffer).wait()
        for tile, section in _tiles(layout):
            lease = self._store.new_tile(tile)
            for plane in tile.planes:
                values = lease.buffer.tensor(PLANE_DTYPES[plane.dtype], tile.num_elements, tile.plane_offset(plane.name))
                for piece in tile_segments(section, tile):
                    into = values[piece.offset : piece.offset + piece.length]
                    checkpoint.read(piece.parameter, plane.name, piece.parameter_offset, piece.length, into)
            self._store.publish_tile(tile, lease)

    def _load_buffers(self, checkpoint: Checkpoint) -> None:
        stored = dict(checkpoint.specs(BUFFER))
        for name, buffer in _buffers(self._module):
            if name in stored:
                into = torch.empty(buffer.numel(), dtype=buffer.dtype)
                checkpoint.read(name, BUFFER, 0, buffer.numel(), into)
                buffer.detach().copy_(into.view(buffer.shape))

    def _fingerprint(self) -> Fingerprint:
        specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for shard in self._shards for spec in shard.layout.specs]
        return Fingerprint(tuple(specs), self._aliases())

    def _aliases(self) -> dict[str, str]:
        return {alias: use.name for shard in self._shards for use in shard.group.uses for alias in use.aliases}


@dataclass(frozen=True, slots=True)
class _ShardSource:
    """The tensors of one shard for a checkpoint."""

    shard: Shard
    store: Store
    weights: Weights

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
        for spec in self.shard.layout.specs:
            with _held(self.weights, self.shard, spec) as weight:
                yield tensor_name(WEIGHT, spec.name), 0, weight.reshape(-1)
        for tile, section in _tiles(self.shard.layout):
            with leased(self.store, tile) as lease:
                for plane in tile.planes:
                    dtype = PLANE_DTYPES[plane.dtype]
                    values = lease.buffer.tensor(dtype, tile.num_elements, tile.plane_offset(plane.name))
                    for piece in tile_segments(section, tile):
                        elements = values[piece.offset : piece.offset + piece.length]
                        yield tensor_name(plane.name, piece.parameter), piece.parameter_offset, elements


@dataclass(frozen=True, slots=True)
class _BufferSource:
    """The module's buffers for a checkpoint."""

    module: nn.Module

    @property
    def name(self) -> str:
        return "buffers"

    @property
    def specs(self) -> Sequence[TensorSpec]:
        return [
            TensorSpec(tensor_name(BUFFER, name), str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
            for name, buffer in _buffers(self.module)
        ]

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        for name, buffer in _buffers(self.module):
            yield tensor_name(BUFFER, name), 0, buffer.detach().cpu().contiguous().view(-1)


@contextmanager
def _held(weights: Weights, shard: Shard, spec: ParameterSpec) -> Iterator[torch.Tensor]:
    """Give one parameter's weight on the CPU for the time of the block; released, its slot may be filled at once."""
    views = weights.acquire(shard.index)
    try:
        yield views[spec.name].detach().cpu()
    finally:
        weights.release(shard.index)


def _tiles(layout: ShardLayout) -> Iterator[tuple[Tile, Section]]:
    return ((tile, layout.sections[tile.section]) for tile in layout.tiles)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)
