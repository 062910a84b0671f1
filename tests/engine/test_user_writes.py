"""What the user writes into parameters that stay in memory, between steps, is what training goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import BULK, TINY_GPT, Run, open_engine, settings
from torch import nn

from infinity.optim.kernel import AdamKernel
from infinity.optim.reference import split_master

NAME = "blocks.0.up.weight"


def zero_some(parameter: nn.Parameter) -> None:
    parameter[::2] = 0.0


def shrink(parameter: nn.Parameter) -> None:
    parameter.mul_(0.3)


def replace(parameter: nn.Parameter) -> None:
    parameter.data = torch.full_like(parameter, 0.25)


@pytest.mark.parametrize("write", [zero_some, shrink, replace], ids=lambda write: write.__name__)
@pytest.mark.parametrize("tile_bytes", ["16KiB", 640])
def test_a_written_weight_is_the_new_master(write: Callable[[nn.Parameter], None], tile_bytes: object, nvme: Path) -> None:
    """The master is the written bf16 value exactly, zeros too, where the old low half would make them not a number.

    The others keep their bits, and the next step starts from the written value: it stays finite and near it.
    """
    with open_engine(TINY_GPT.build(), settings(nvme, tile_bytes=tile_bytes, lr=1e-3)) as engine:
        for step in range(2):
            engine.train_batch(TINY_GPT.batches(step, 1, torch.bfloat16))
        before = engine.state_dict()
        parameter = engine.module.get_parameter(NAME)
        with torch.no_grad():
            write(parameter)
        written = parameter.detach().clone()
        state = engine.state_dict()
        assert torch.equal(state.pop(NAME), written.float())
        assert all(torch.equal(value, before[name]) for name, value in state.items())
        engine.train_batch(TINY_GPT.batches(2, 1, torch.bfloat16))
        after = engine.state_dict()[NAME]
        assert torch.equal(engine.module.get_parameter(NAME), split_master(after)[0])
        assert (after - written.float()).abs().max() < 5e-3
        assert not torch.equal(after, written.float())


def test_resident_weights_are_new_when_the_step_returns(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the update takes: what is read or written right after a step meets no weight that is still to change."""
    update = AdamKernel.adam_update

    def slow_update(*args: object, **kwargs: object) -> None:
        time.sleep(0.003)
        update(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(AdamKernel, "adam_update", slow_update)
    with open_engine(BULK.build(), settings(nvme)) as engine:
        for step in range(2):
            engine.train_batch(BULK.batches(step, 1, torch.bfloat16))
            seen = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
            state = engine.state_dict()
            assert [name for name, value in seen.items() if not torch.equal(value, split_master(state[name])[0])] == []


def test_writes_count_at_the_next_step_without_a_look(nvme: Path) -> None:
    """Written and looked at, or written and stepped at once: the same weights. A checkpoint loaded later keeps its bits."""
    states, checkpoint = [], nvme / "checkpoint"
    for looks in (False, True):
        run = Run()
        with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
            engine.train_batch(TINY_GPT.batches(0, 1, torch.bfloat16))
            path = engine.save_checkpoint(checkpoint / str(looks))
            before = engine.state_dict()
            with torch.no_grad():
                engine.module.get_parameter(NAME).zero_()
            if looks:
                run.state = engine.state_dict()
            engine.train_batch(TINY_GPT.batches(1, 1, torch.bfloat16))
            states.append(engine.state_dict())
            with torch.no_grad():
                engine.module.get_parameter(NAME).zero_()
            engine.load_checkpoint(path)
            loaded = engine.state_dict()
            assert all(torch.equal(loaded[name], before[name]) for name in before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
