"""Steps that were begun and are not wanted: forward passes without backward, zero_grad, and losses that come too late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same, require_same_state, settings, train, train_engine

from infinity.errors import IllegalTransition

TIERS = pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)


def one(step: int) -> tuple[object, ...]:
    return TINY_GPT.batches(step, 1, torch.bfloat16)[0]


@TIERS
def test_forward_passes_without_backward_are_forgotten(tiers: tuple[str, str], nvme: Path, tmp_path: Path) -> None:
    """Their losses were looked at and dropped: train_batch and load_checkpoint go on as if they had not been."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2)
    expected = train(TINY_GPT, config, num_steps=2)
    with open_engine(TINY_GPT.build(), config) as engine:
        path = engine.save_checkpoint(tmp_path)
        engine(*one(50))
        engine(*one(51))
        engine.load_checkpoint(path)
        engine(*one(52))
        run = train_engine(engine, TINY_GPT, config, range(2))
    require_same(run, expected)


@TIERS
def test_zero_grad_discards_what_was_summed(tiers: tuple[str, str], nvme: Path) -> None:
    """After one of two backward passes train_batch is refused and names zero_grad, which leads out; no trace is left."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2, schedule="horizontal")
    expected = train(TINY_GPT, config, num_steps=2)
    with open_engine(TINY_GPT.build(), config) as engine:
        engine.zero_grad()  # nothing was begun: nothing happens
        engine.backward(engine(*one(50)))
        with pytest.raises(IllegalTransition, match=r"1 of 2 backward passes into a step.*engine\.zero_grad\(\)"):
            engine.train_batch(TINY_GPT.batches(0, 2, torch.bfloat16))
        engine.zero_grad()
        run = train_engine(engine, TINY_GPT, config, range(2))
        engine.zero_grad()
        require_same_state(engine.state_dict(), run.state)
    require_same(run, expected)


@TIERS
@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_a_loss_of_a_step_that_is_over_is_refused(end: str, tiers: tuple[str, str], nvme: Path) -> None:
    """Its weights are gone: backward is an error before anything is summed, also when the next step has begun."""
    config = settings(nvme, optim=tiers[0], params=tiers[1])
    states = []
    for is_late in (False, True):
        with open_engine(TINY_GPT.build(), config) as engine:
            late, loss = engine(*one(50)), engine(*one(0))
            if end == "step":
                engine.backward(loss)
                engine.step()
            else:
                engine.zero_grad()
            if is_late:
                with pytest.raises(IllegalTransition, match="whose step is over"):
                    late.backward()
            loss = engine(*one(1))
            if is_late:
                with pytest.raises(IllegalTransition, match="whose step is over"):
                    late.backward()
            engine.backward(loss)
            engine.step()
            states.append(engine.state_dict())
    require_same_state(states[1], states[0])


def test_a_step_inside_backward_is_refused(nvme: Path) -> None:
    """A hook that calls the engine while backward runs gets a sentence, whichever of the calls it is."""
    config = settings(nvme, optim="nvme", params="nvme")
    with open_engine(TINY_GPT.build(), config) as engine:
        for call in (lambda: engine.train_batch([one(0)]), engine.zero_grad):
            loss = engine(*one(0))
            loss.register_hook(lambda _, call=call: call())
            with pytest.raises(IllegalTransition, match="while the engine's own module runs"):
                engine.backward(loss)
        assert engine.global_steps == 0
        engine.backward(engine(*one(0)))
        engine.step()
        assert engine.global_steps == 1
