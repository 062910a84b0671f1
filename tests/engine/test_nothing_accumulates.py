"""No step leaves anything behind: neither tensors nor micro-batches."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, settings

from infinity.engine import Engine
from infinity.zero.micro_batch import MicroBatch


def num_alive() -> int:
    """Return how many tensors and micro-batches exist, collectable cycles aside."""
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor | MicroBatch) for found in gc.get_objects())


def take_step(engine: Engine, order: str, step: int) -> None:
    micro_batches = TINY_GPT.batches(step, 2)
    if order != "familiar":
        engine.train_batch(micro_batches)
        return
    for micro_batch in micro_batches:
        engine.backward(engine(*micro_batch))
        engine.step()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("order", ["vertical", "horizontal", "familiar"])
def test_steps_leave_no_tensors_behind(order: str, tier: str, nvme: Path) -> None:
    """C17: as many tensors and micro-batches are alive after six steps as after three."""
    schedule = "vertical" if order == "vertical" else "horizontal"
    config = settings(nvme, num_micro_batches=2, optim=tier, params=tier, schedule=schedule)
    counts = []
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(6):
            take_step(engine, order, step)
            counts.append(num_alive())
    assert counts[2] == counts[5]
