"""What a rank does to train a model on its part of a global batch, and what it brings back from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kit import MicroBatch, compute_dtype, open_engine, settings
from matrix_cells import Cell
from rank_models import CLIP, EPS, LR, MODELS, NUM_ROWS, WEIGHT_DECAY, Rows
from torch import Tensor

from infinity.engine import Engine, StepResult
from infinity.memory.ledger import LedgerLine
from infinity.placement import Plan


@dataclass(frozen=True)
class Asked:
    """A run to be made on every rank. The global batch of a step is `num_rows` rows, whatever it is split into."""

    config: Mapping[str, Any]
    num_steps: int
    model: str = "tiny-gpt"
    num_rows: int = NUM_ROWS


@dataclass(frozen=True)
class RankRun:
    """What one rank has seen of a training run."""

    results: tuple[StepResult, ...]
    digest: str  # of the fp32 master of every parameter, in bits
    state: Mapping[str, Tensor]  # the same, element by element, and the buffers; rank 0 alone
    counters: tuple[Mapping[str, int], ...]  # of each step
    memory: tuple[LedgerLine, ...]
    plan: Plan

    @property
    def losses(self) -> tuple[tuple[float, ...], ...]:
        """This rank's, by step and micro-batch."""
        return tuple(result.losses for result in self.results)


def asked_of(cell: Cell, nvme: Path | str, num_steps: int, *, model: str = "tiny-gpt", num_rows: int = NUM_ROWS) -> Asked:
    """Return the run of a cell of the matrix."""
    own = {"gradient_reduction": cell.gradient_reduction} if cell.gradient_reduction else {}
    config = settings(
        Path(nvme), optim=cell.optim, params=cell.params, bf16=cell.precision == "bf16",
        num_micro_batches=cell.num_micro_batches, clip=CLIP, lr=LR, weight_decay=WEIGHT_DECAY,
        fp16={"initial_scale_power": 10} if cell.precision == "fp16" else None, schedule=cell.schedule,
        weight_slots=2, check=False, **own,
    )  # fmt: skip
    config["optimizer"]["params"]["eps"] = EPS
    config["train_micro_batch_size_per_gpu"] = num_rows // (cell.num_ranks * cell.num_micro_batches)
    config["zero_optimization"]["stage"] = cell.stage
    return Asked(config, num_steps, model, num_rows)


def own_part(rows: Rows, num_micro_batches: int, dtype: torch.dtype) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global batch: rank 0's come first, and all have equally many rows."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    split = [value.to(dtype) if value.is_floating_point() else value for value in rows]
    parts = list(zip(*(value.chunk(num_ranks * num_micro_batches) for value in split), strict=True))
    return parts[rank * num_micro_batches : (rank + 1) * num_micro_batches]


def micro_batches(asked: Asked, step: int) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step."""
    rows = MODELS[asked.model].batch(step, asked.num_rows)
    return own_part(rows, asked.config["gradient_accumulation_steps"], compute_dtype(asked.config))


def train(asked: Asked, **options: Any) -> RankRun:
    """Train a fresh model on this rank's part of every global batch."""
    with open_engine(MODELS[asked.model].kit.build(), asked.config, **options) as engine:
        return train_engine(engine, asked)


def train_engine(engine: Engine, asked: Asked) -> RankRun:
    """Take all steps with an engine that is there."""
    results, counters = [], []
    before = dict(engine.recorder.counters())
    for step in range(asked.num_steps):
        results.append(engine.train_batch(micro_batches(asked, step)))
        now = dict(engine.recorder.counters())
        counters.append({name: total - before.get(name, 0) for name, total in now.items()})
        before = now
    digest = digest_of(dict(engine.full_parameters()))
    return RankRun(
        results=tuple(results),
        digest=digest,
        state=engine.state_dict(),
        counters=tuple(counters),
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
