"""What a rank does to train a model of the kit on its part of a global batch, and what it brings back from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kit import VOCABULARY, MicroBatch, compute_dtype, kit_of, open_engine, settings
from matrix_cells import Cell
from torch import Tensor

from infinity.engine import Engine, StepResult
from infinity.memory.ledger import LedgerLine
from infinity.placement import Plan

NUM_ROWS = 24  # sequences in a global batch: they divide by every number of ranks and of micro-batches
LENGTH = 16  # tokens in a sequence
# Where a gradient is zero but for rounding (the bias of keys), Adam would make a step of the whole lr out of its sign.
EPS = 1e-5


@dataclass(frozen=True)
class RankRun:
    """What one rank has seen of a training run."""

    results: tuple[StepResult, ...]
    digest: str  # of every parameter and buffer, in bits
    state: Mapping[str, Tensor]  # the same, element by element; rank 0 alone
    counters: Mapping[str, int]  # of the last step
    memory: tuple[LedgerLine, ...]
    plan: Plan

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """This rank's, by step and micro-batch."""
        return tuple(result.losses for result in self.results)


@dataclass(frozen=True)
class Asked:
    """A run to be made on every rank. The global batch of a step is `num_rows` rows, whatever it is split into."""

    config: Mapping[str, Any]
    num_steps: int
    kit: str = "tiny-gpt"
    num_rows: int = NUM_ROWS


def asked_of(cell: Cell, nvme: Path, num_steps: int) -> Asked:
    """Return the run of a cell of the matrix."""
    own = {"gradient_reduction": cell.gradient_reduction} if cell.gradient_reduction else {}
    config = settings(
        nvme, optim=cell.optim, params=cell.params, bf16=cell.precision == "bf16", num_micro_batches=cell.num_micro_batches,
        lr=1e-3, fp16={"initial_scale_power": 10} if cell.precision == "fp16" else None, schedule=cell.schedule, **own,
    )  # fmt: skip
    rows = NUM_ROWS // (cell.num_ranks * cell.num_micro_batches)
    config["optimizer"]["params"]["eps"] = EPS
    return Asked(at_stage(config, cell.stage) | {"train_micro_batch_size_per_gpu": rows}, num_steps)


def at_stage(config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the configuration with a ZeRO stage."""
    return {**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}


def global_batch(step: int, num_rows: int = NUM_ROWS) -> MicroBatch:
    """Return the tokens and targets that all ranks together train on in a step, int64 [num_rows, LENGTH]."""
    drawn = torch.randint(VOCABULARY, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + step))
    return drawn[:, :-1], drawn[:, 1:]


def own_part(values: MicroBatch, num_micro_batches: int, dtype: torch.dtype) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global batch: rank 0's come first, and all have equally many rows."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    split = [value.to(dtype) if value.is_floating_point() else value for value in values]
    parts = list(zip(*(value.chunk(num_ranks * num_micro_batches) for value in split), strict=True))
    return parts[rank * num_micro_batches : (rank + 1) * num_micro_batches]


def train(asked: Asked, batch: Callable[[int, int], MicroBatch] = global_batch) -> RankRun:
    """Train a fresh model on this rank's part of every global batch."""
    config = asked.config
    with open_engine(kit_of(asked.kit).build(), config) as engine:
        results = []
        for step in range(asked.num_steps):
            values = batch(step, asked.num_rows)
            results.append(
                engine.train_batch(own_part(values, config["gradient_accumulation_steps"], compute_dtype(config)))
            )
        return seen(engine, results)


def seen(engine: Engine, results: list[StepResult]) -> RankRun:
    """Return what this rank has seen."""
    counters = dict(engine.recorder.counters())
    state = engine.state_dict()
    return RankRun(
        results=tuple(results),
        digest=digest_of(state),
        state={name: value.clone() for name, value in state.items()} if os.environ["RANK"] == "0" else {},
        counters=counters,
        memory=engine.memory_report(),
        plan=engine.plan,
    )


def digest_of(state: Mapping[str, Tensor]) -> str:
    """Return a digest of names and bits."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
