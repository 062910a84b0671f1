"""What can happen to the ranks of a job besides training: data that ends early, slow disks, refused configurations."""

from __future__ import annotations

import os
import random
import time
from unittest.mock import patch

import pytest
from kit import open_engine
from rank_models import MODELS
from rank_training import Asked, RankRun, micro_batches, train
from separate_device import install

import infinity.engine.directories as directories
from infinity.aio.engine import Engine as IoEngine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine


def end_early(asked: Asked, early_rank: int) -> None:
    """Train, but one rank has data for one step less, and closes its engine."""
    num_steps = asked.num_steps - (int(os.environ["RANK"]) == early_rank)
    with open_engine(MODELS[asked.model].kit.build(), asked.config) as engine:
        for step in range(num_steps):
            engine.train_batch(micro_batches(asked, step))


def fail_in_step(asked: Asked, failing_rank: int) -> None:
    """Train, but the last step of one rank has a micro-batch that its model cannot take."""
    with open_engine(MODELS[asked.model].kit.build(), asked.config) as engine:
        for step in range(asked.num_steps):
            parts = micro_batches(asked, step)
            if step == asked.num_steps - 1 and int(os.environ["RANK"]) == failing_rank:
                parts[-1] = (parts[-1][0] + 1_000_000, *parts[-1][1:])
            engine.train_batch(parts)


def train_late_and_slowly(asked: Asked) -> RankRun:
    """Train while reads and writes end late at random, on each rank others, and each rank begins a step when it likes."""
    draw = random.Random(int(os.environ["RANK"]))
    opened = directories.open_engine

    def open_slow(*arguments: object, **options: object) -> IoEngine:
        delay = Fault(FaultKind.DELAY, lambda request: draw.random() < 0.2, delay_seconds=0.004)
        return FaultyEngine(opened(*arguments, **options), [delay])  # type: ignore[arg-type]

    def batch_later(rows: object, step: int) -> list[tuple[object, ...]]:
        time.sleep(0.02 * draw.random())
        return micro_batches(rows, step)  # type: ignore[arg-type]

    with patch.object(directories, "open_engine", open_slow), patch("rank_training.micro_batches", batch_later):
        return train(asked)


def train_on_separate_device(asked: Asked, late: bool) -> RankRun:
    """Train on a compute device with memory of its own, played by the CPU; its copies end at once or as late as may be."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, late=late)
        return train(asked)
