"""What initialize takes, and what it leaves of a model when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import TINY_GPT, Kit, TinyGpt, open_engine, settings
from torch import nn

import infinity
import infinity.engine.build as build
import infinity.engine.gradient_path as gradient_path
from infinity.errors import IllegalTransition, ModelError


class Boom(Exception):
    """What a test makes go wrong."""


def _boom(*_: Any, **__: Any) -> Any:
    raise Boom


@pytest.mark.parametrize("where", ["Weights", "WaitingGradients", "GradientSums", "Persistence", "VerticalSchedule"])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_a_failed_start_gives_the_model_back(tier: str, where: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails after the model's parameters were replaced: the user's own are back, with values, and it runs."""
    model = TINY_GPT.build()
    own = dict(model.named_parameters())
    with monkeypatch.context() as patched:
        patched.setattr(gradient_path if hasattr(gradient_path, where) else build, where, _boom)
        with pytest.raises(Boom):
            open_engine(model, settings(nvme, optim=tier, params=tier))
    found = dict(model.named_parameters())
    assert found.keys() == own.keys()
    assert all(found[name] is own[name] for name in own)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in TINY_GPT.build().state_dict().items())
    model(*TINY_GPT.batches(0, 1)[0]).backward()
    assert all(parameter.grad is not None for parameter in own.values())
    model.zero_grad()
    with open_engine(model, settings(nvme, optim=tier, params=tier)) as engine:
        engine.train_batch(TINY_GPT.batches(0, 1))


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_a_model_has_one_engine(tier: str, nvme: Path) -> None:
    """A second engine, on the model or on a part of it, open or closed, is refused with a way out; the first goes on."""
    model = TINY_GPT.build()
    config = settings(nvme, optim=tier, params=tier)
    with open_engine(model, config) as engine:
        for again in (model, nn.Sequential(model)):
            with pytest.raises(IllegalTransition, match=r"was given to infinity\.initialize before"):
                open_engine(again, config)
        engine.train_batch(TINY_GPT.batches(0, 1))
    with pytest.raises(IllegalTransition, match="build the model anew"):
        open_engine(model, config)


@pytest.mark.parametrize(("wrong", "said"), [(None, "a NoneType"), (TinyGpt, "the class TinyGpt"), ("gpt", "a str")])
def test_what_is_no_module_is_named(wrong: Any, said: str, nvme: Path) -> None:
    """None, a class and a name are refused with what they are; nothing was made."""
    with pytest.raises(ModelError, match=f"model is {said}, not a torch.nn.Module"):
        infinity.initialize(model=wrong, config=settings(nvme))
    assert list(nvme.iterdir()) == []


GROUPS = [
    ({"betas": 0.9}, "betas is 0.9, not a pair of numbers"),
    ({"betas": (0.9, 1.0)}, "betas is 1.0, not a number from 0 to below 1"),
    ({"eps": "small"}, "eps is 'small', not a number"),
    ({"weight_decay": float("nan")}, "weight_decay is nan, not a number"),
]


@pytest.mark.parametrize(("change", "said"), GROUPS, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("familiar", [False, True])
def test_wrong_hyper_parameters_are_named(familiar: bool, change: dict[str, Any], said: str, nvme: Path) -> None:
    """What the user put into param_groups is a ConfigError at the next step; that step is discarded, the next is taken."""
    with open_engine(TINY_GPT.build(), settings(nvme, optim="nvme", params="nvme")) as engine:
        before = dict(engine.optimizer.param_groups[0])

        def step() -> None:
            batch = TINY_GPT.batches(0, 1)[0]
            if familiar:
                engine.backward(engine(*batch))
                engine.step()
            else:
                engine.train_batch([batch])

        engine.optimizer.param_groups[0].update(change)
        with pytest.raises(infinity.ConfigError) as caught:
            step()
        assert said in str(caught.value)
        assert engine.global_steps == 0
        engine.optimizer.param_groups[0].update(before)
        step()
        assert engine.global_steps == 1


def test_buffers_come_back_too(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's buffers after a failed start are the user's own objects."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    own = dict(model.named_buffers())
    kit = Kit("norm", lambda: model, lambda generator, step: (torch.randn(4, 8, generator=generator),))
    monkeypatch.setattr(build, "Weights", _boom)
    with pytest.raises(Boom):
        open_engine(kit.build(), settings(nvme))
    assert all(buffer is own[name] for name, buffer in model.named_buffers())
