"""What ranks do around checkpoints: train, save, stop, load in new engines on other stages, and go on."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kit import DROPOUT_GPT, TINY_GPT, Kit, compute_dtype, kit_of, open_engine

from infinity import utils
from infinity.engine import Engine
from infinity.errors import InfinityError

NUM_MICRO_BATCHES = 2  # of a rank and step


@dataclass(frozen=True)
class Seen:
    """What a rank has seen: losses by step, and digests of its state, in bits."""

    losses: tuple[tuple[float, ...], ...]
    weights: str
    moments: str
    facts: Mapping[str, Any]


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def take(engine: Engine, kit: Kit, config: Mapping[str, Any], steps: Iterable[int]) -> list[tuple[float, ...]]:
    """Take steps with this rank's micro-batches of each; return the losses."""
    rank, size = rank_and_size()
    losses = []
    for step in steps:
        batches = kit.batches(step, NUM_MICRO_BATCHES * size, compute_dtype(config))
        own = batches[rank * NUM_MICRO_BATCHES : (rank + 1) * NUM_MICRO_BATCHES]
        losses.append(engine.train_batch(own).losses)
    return losses


def digest(values: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, value in values:
        found.update(name.encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def moments(engine: Engine) -> list[tuple[str, torch.Tensor]]:
    """Return both moments of every trained parameter, whole."""
    found = []
    for name, parameter in engine.module.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            value = utils.safe_get_full_optimizer_state(parameter, state)
            if value is not None:
                found.append((f"{state} {name}", value))
    return found


def seen(engine: Engine, losses: Sequence[tuple[float, ...]], **facts: Any) -> Seen:
    state = sorted(engine.state_dict().items())
    return Seen(tuple(losses), digest(state), digest(moments(engine)), facts)


def train_through(kit: str, config: Mapping[str, Any], num_steps: int) -> Seen:
    """Train without a stop."""
    with open_engine(kit_of(kit).build(), config) as engine:
        return seen(engine, take(engine, kit_of(kit), config, range(num_steps)))


def train_and_save(
    kit: str, config: Mapping[str, Any], num_steps: int, directory: str, die_after: int | None = None
) -> Seen:
    """Train and save; then, where asked, take some steps more and die without a word."""
    with open_engine(kit_of(kit).build(), config) as engine:
        losses = take(engine, kit_of(kit), config, range(num_steps))
        torch.manual_seed(100 + rank_and_size()[0])  # each rank draws on its own beside the engine
        path = engine.save_checkpoint(directory, client_state={"rank": rank_and_size()[0]})
        drawn = torch.rand(3).tolist()
        if die_after is not None:
            take(engine, kit_of(kit), config, range(num_steps, num_steps + die_after))
            os.kill(os.getpid(), signal.SIGKILL)
        return seen(engine, losses, path=str(path), drawn=drawn)


def load_and_train(kit: str, config: Mapping[str, Any], directory: str, until: int) -> Seen:
    """Load into a model of other values and train on."""
    with open_engine(kit_of(kit).build(seed=9 + rank_and_size()[0]), config) as engine:
        loaded = engine.load_checkpoint(directory)
        drawn = torch.rand(3).tolist()
        losses = take(engine, kit_of(kit), config, range(engine.global_steps, until))
        return seen(engine, losses, client_state=loaded.client_state, path=str(loaded.path), drawn=drawn)


def load(kit: str, config: Mapping[str, Any], directory: str) -> Seen:
    with open_engine(kit_of(kit).build(seed=9), config) as engine:
        engine.load_checkpoint(directory)
        return seen(engine, [])


def adopt(config: Mapping[str, Any], checkpoint: str) -> None:
    """Take over a checkpoint in place."""
    open_engine(TINY_GPT.build(), config, adopt=Path(checkpoint)).close()


def fill_the_disk_in_the_middle(config: Mapping[str, Any], directory: str) -> Seen:
    """Save; save again with a disk on rank 0 that is full after some writes; go on and save."""
    original, calls = os.pwrite, [0]

    def full(fd: int, data: memoryview, offset: int) -> int:
        calls[0] += 1
        if calls[0] == 40:
            raise OSError(28, os.strerror(28))
        return original(fd, data, offset)

    with open_engine(DROPOUT_GPT.build(), config) as engine:
        losses = take(engine, DROPOUT_GPT, config, range(2))
        engine.save_checkpoint(directory)
        losses += take(engine, DROPOUT_GPT, config, range(2, 3))
        said = ""
        with patch("os.pwrite", full if rank_and_size()[0] == 0 else original):
            try:
                engine.save_checkpoint(directory)
            except InfinityError as error:
                said = f"{type(error).__name__}: {error}"
        engine.group.gather(None, what="both have failed")
        left = sorted(path.name for path in Path(directory).iterdir())
        losses += take(engine, DROPOUT_GPT, config, range(3, 4))
        engine.save_checkpoint(directory)
        return seen(engine, losses, said=said, left=left, num_writes=calls[0])


def die_in_a_save(config: Mapping[str, Any], directory: str, dying_rank: int) -> None:
    """Save; in the second save one rank is killed in the middle of its tiles."""
    from infinity.store.store import Store

    original, calls = Store.fetch_tile, [0]

    def dying(self: Store, tile: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, tile)

    with open_engine(TINY_GPT.build(), config) as engine:
        take(engine, TINY_GPT, config, range(1))
        engine.save_checkpoint(directory)
        take(engine, TINY_GPT, config, range(1, 2))
        engine.synchronize()
        with patch.object(Store, "fetch_tile", dying if rank_and_size()[0] == dying_rank else original):
            engine.save_checkpoint(directory)


def refuse_in_place(config: Mapping[str, Any], directory: str) -> Seen:
    """Save where there is no room for a copy, and train on."""
    with open_engine(TINY_GPT.build(), config) as engine:
        said = ""
        free = "infinity.checkpoint.writer.shutil.disk_usage"
        with patch(free) as usage:
            usage.return_value.free = 100
            try:
                engine.save_checkpoint(directory)
            except InfinityError as error:
                said = f"{type(error).__name__}: {error}"
        return seen(engine, take(engine, TINY_GPT, config, range(1)), said=said)


def save_in_place_and_stop(config: Mapping[str, Any], directory: str) -> None:
    """Save on one rank where there is no room for a copy."""
    with open_engine(TINY_GPT.build(), config) as engine, patch("infinity.checkpoint.writer.shutil.disk_usage") as usage:
        usage.return_value.free = 20 << 10  # enough for a manifest
        engine.save_checkpoint(directory)


def load_apart(config: Mapping[str, Any], directory: str) -> Seen:
    """Each rank is told another of two checkpoints; then both the same."""
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            take(engine, TINY_GPT, config, range(step, step + 1))
            engine.save_checkpoint(directory)
        said = ""
        try:
            engine.load_checkpoint(Path(directory) / f"step-{1 + rank_and_size()[0]:08d}")
        except InfinityError as error:
            said = f"{type(error).__name__}: {error}"
        engine.load_checkpoint(Path(directory) / "step-00000001")
        return seen(engine, take(engine, TINY_GPT, config, range(1, 2)), said=said)
