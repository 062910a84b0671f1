"""State out of the tiers and back: full parameters, checkpoints, one tile and one parameter at a time, over all ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import nn

from infinity.checkpoint.manifest import CheckpointState, Counters, Fingerprint, state_to_json
from infinity.checkpoint.reader import Checkpoint, open_checkpoint
from infinity.checkpoint.sources import UnitSource
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.writer import write_checkpoint
from infinity.comm.group import Json
from infinity.comm.verdict import together
from infinity.engine.exchange import Exchange
from infinity.engine.in_place import commit_in_place, require_adopted
from infinity.engine.kept_states import KeptStates
from infinity.engine.loss_scaler import LossScaler
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.masters import Masters
from infinity.engine.optimizer import Optimizer
from infinity.engine.save_together import write_together
from infinity.engine.shard_sources import BufferSource, ShardSource, load_buffers, load_shard
from infinity.engine.tags import directory_of, find, note_latest
from infinity.errors import CheckpointMismatch, SwapSpaceError
from infinity.memory.arena import Buffer
from infinity.store.store import Store
from infinity.zero.shard import Shard
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
    """Reads and replaces the state of a drained engine; every rank makes every call.

    `staging` gives host memory for one shard's weights.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        shards: Sequence[Shard],
        store: Store,
        weights: Weights,
        masters: Masters,
        exchange: Exchange,
        kept: KeptStates,
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
        self._masters = masters
        self._exchange = exchange
        self._kept = kept
        self._optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._loss_scaler = loss_scaler
        self._precision = precision
        self._staging = staging
        self._cpu_memory_bytes = cpu_memory_bytes  # the budget that the layout was planned for
        self.is_torn = False  # a load has replaced part of the state and did not end
        self._adopted = adopted  # the checkpoint in place whose swap files this store took over

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's fp32 master in order of the shards, on the CPU, on every rank."""
        for shard in self._shards:
            for spec in shard.layout.specs:
                yield spec.name, self._masters.whole(shard, spec)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all of them with the tied names, and the persistent buffers, on every rank."""
        values = dict(self.full_parameters())
        for alias, name in self._aliases().items():
            values[alias] = values[name]
        values.update({name: buffer.detach().cpu().clone() for name, buffer in _persistent_buffers(self._module)})
        return values

    def save(
        self, directory: Path, tag: str | None, steps: StepCounts, *, extra: dict[str, object], keep: int | None
    ) -> Path:
        """Write one checkpoint, on rank 0, and return its path; `latest` then says which tag it has.

        An error of rank 0 is raised on every rank, and each of them can go on. `extra` and the buffers are those of rank 0.
        """
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
            rng_state=self._rng_states(),
            loss_scale=self._loss_scaler.record(),
            optimizer=self._kept.optimizer_name,
            groups=self._optimizer.moved(),  # type: ignore[arg-type]
        )
        saved = self._kept.saved()

        def write(units: Sequence[UnitSource]) -> Path:
            path = self._write(directory_of(directory, tag), units, state, keep)
            note_latest(directory, tag)
            return path

        units = [
            self._kept.beside(ShardSource(shard, self._store, self._weights, self._exchange), shard.layout, saved)
            for shard in self._shards
        ]
        what = f"checkpoint of step {steps.taken}" + (f" with tag {tag}" if tag is not None else "")
        return write_together(self._exchange.group, units, write, what=what)

    def _write(self, directory: Path, units: Sequence[UnitSource], state: CheckpointState, keep: int | None) -> Path:
        """Write a copy, or where there is no room for one, let the swap files themselves be the checkpoint."""
        buffers = BufferSource(self._module)
        try:
            return write_checkpoint(directory, units, state, buffers=buffers, keep=keep)
        except SwapSpaceError as error:
            if not self._store.directories:
                raise
            if self._exchange.group.size > 1:
                raise SwapSpaceError(
                    f"{error.message} Over several ranks the swap files cannot be the checkpoint instead.",
                    remedy=error.remedy,
                    errno=error.errno or 0,
                ) from error
        return commit_in_place(self._store, directory, state, buffers=buffers, cpu_memory_bytes=self._cpu_memory_bytes)

    def load(self, path: Path, tag: str | None) -> Restored:
        """Replace the whole state by a checkpoint's; see `tags.find` for which. Each rank reads the ranges of its own tiles.

        What is wrong on one rank is raised on all; until every rank has found the same whole checkpoint nothing is changed.
        """
        with ExitStack() as opened:
            with together(self._exchange.group, what="opening a checkpoint"):
                checkpoint = opened.enter_context(open_checkpoint(find(path, tag)))
                checkpoint.require_match(self._fingerprint())
                state = checkpoint.state
                self._kept.require_same(state.optimizer, str(checkpoint.path))
                loss_scale = self._loss_scaler.recorded(state.loss_scale)
                if checkpoint.manifest.swap_files:
                    require_adopted(checkpoint, self._adopted)
            self._require_one_checkpoint(checkpoint)
            is_copy = not checkpoint.manifest.swap_files
            self.is_torn = True
            if is_copy:
                self._weights.forget()
            with together(self._exchange.group, what="reading a checkpoint"):
                for shard in self._shards if is_copy else ():
                    load_shard(checkpoint, shard.layout, self._store, self._staging(shard.index))
                self._kept.load(checkpoint)
                load_buffers(checkpoint, self._module)
            if is_copy:
                self._weights.show_resident()
                self._weights.rewind()
            self.is_torn = False
        counters = state.counters
        self._optimizer.steps = dict(counters.parameter_steps)
        self._lr_schedule.num_applied_steps = counters.schedule_position
        self._optimizer.move(state.groups if isinstance(state.groups, list) else ())  # type: ignore[arg-type]
        self._loss_scaler.state = loss_scale
        self._set_rng_state(state.rng_state)
        extra = state.data_position if isinstance(state.data_position, dict) else {}
        return Restored(checkpoint.path, StepCounts(counters.global_step, counters.skipped_steps), dict(extra))

    def _require_one_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointMismatch unless every rank has opened the same one: each looks at its own machine's files."""
        group = self._exchange.group
        if group.size == 1:
            return
        digest = zlib.crc32(json.dumps(state_to_json(checkpoint.state), sort_keys=True).encode())
        mine: Json = [checkpoint.path.name, checkpoint.state.counters.global_step, digest]
        found = group.gather(mine, what="the checkpoint that was opened")
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise CheckpointMismatch(
                    f"Rank 0 opens the checkpoint {_described(found[0])}, rank {rank} opens {_described(theirs)}.",
                    remedy="Name one checkpoint, and copy it to every machine that does not share the directory.",
                )

    def _rng_states(self) -> JsonValue:
        """Return the state of torch's generator on every rank; with one rank, its alone."""
        mine = torch.get_rng_state().numpy().tobytes().hex()
        states: list[JsonValue] = list(self._exchange.group.gather(mine, what="states of the generators"))  # type: ignore[arg-type]
        return states if len(states) > 1 else mine

    def _set_rng_state(self, recorded: JsonValue) -> None:
        """Take up this rank's state; where it was saved over another number of ranks, that of rank 0."""
        group = self._exchange.group
        states = recorded if isinstance(recorded, list) else [recorded]
        state = states[group.rank if len(states) == group.size else 0] if states else None
        if isinstance(state, str):
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))

    def _fingerprint(self) -> Fingerprint:
        specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for shard in self._shards for spec in shard.layout.specs]
        return Fingerprint(tuple(specs), self._aliases())

    def _aliases(self) -> dict[str, str]:
        return {alias: use.name for shard in self._shards for use in shard.group.uses for alias in use.aliases}


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)


def _described(found: Json) -> str:
    name, step, digest = found if isinstance(found, list) else (found, None, 0)
    return f"{name} of step {step} ({digest:08x})"
