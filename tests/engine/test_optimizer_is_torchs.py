"""What `initialize` returns as the optimizer is one of torch's to schedulers and to those who keep its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import ODD_MLP, TINY_GPT, open_engine, settings
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from infinity.engine import Engine
from infinity.errors import ConfigError, ModelError
from infinity.utils import safe_set_full_fp32_param

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=8),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
}


def config(nvme: Path, name: str, **options: Any) -> dict[str, Any]:
    return {**settings(nvme, bf16=False, clip=0.0, **options), "optimizer": OPTIMIZERS[name]}


def familiar_step(engine: Engine, step: int) -> None:
    [batch] = ODD_MLP.batches(step, 1)
    engine.backward(engine(*batch))
    engine.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedulers_of_torch_move_it(name: str, scheduler: str, nvme: Path) -> None:
    """C63: a scheduler over engine.optimizer sets what each step uses, momentum included, and warns of nothing."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = getattr(torch.optim, name)([parameter], **OPTIMIZERS[name]["params"])
    expected = SCHEDULERS[scheduler](theirs)
    with open_engine(ODD_MLP.build(), config(nvme, name)) as engine:
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        schedule = SCHEDULERS[scheduler](engine.optimizer)
        for step in range(4):
            assert engine.lr == engine.get_lr()[0] == theirs.param_groups[0]["lr"]
            for key in ("betas", "momentum"):
                assert engine.optimizer.param_groups[0].get(key) == theirs.param_groups[0].get(key)
            familiar_step(engine, step)
            theirs.step()
            schedule.step()
            expected.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_moved_rate_is_the_one_that_steps(name: str, nvme: Path, tmp_path: Path) -> None:
    """C63: lr 0 in a group stops its weights at once; a checkpoint brings back what was moved, and nothing else."""
    with open_engine(ODD_MLP.build(), config(nvme, name)) as engine:
        familiar_step(engine, 0)
        engine.optimizer.param_groups[0]["lr"] = 0.0
        before = engine.state_dict()
        familiar_step(engine, 1)
        assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
        engine.save_checkpoint(tmp_path)
    with open_engine(
        ODD_MLP.build(), {**config(nvme, name), "optimizer": {**OPTIMIZERS[name], "params": {"lr": 0.5}}}
    ) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.lr == 0.0
        assert engine.optimizer.param_groups[0].get("momentum", 0.0) == 0.0


@pytest.mark.parametrize(("name", "tier"), [("AdamW", "nvme"), ("AdamW", "cpu"), ("SGD", "cpu")])
def test_state_dict_goes_there_and_back(name: str, tier: str, nvme: Path) -> None:
    """C63: the state of one engine, loaded into another with the same weights, makes the same next steps bit for bit."""
    options = config(nvme, name, optim=tier)
    with open_engine(ODD_MLP.build(), options) as engine:
        for step in range(2):
            familiar_step(engine, step)
        engine.optimizer.param_groups[0]["weight_decay"] = 0.3
        weights, state = engine.state_dict(), engine.optimizer.state_dict()
        for step in range(2, 4):
            familiar_step(engine, step)
        expected = engine.state_dict()
    model = ODD_MLP.build(seed=1)
    model.load_state_dict(weights)
    with open_engine(model, options) as engine:
        familiar_step(engine, 7)  # its own state, which is replaced
        for key, parameter in engine.module.named_parameters():
            safe_set_full_fp32_param(parameter, weights[key])
        engine.optimizer.load_state_dict(state)
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.3
        for step in range(2, 4):
            familiar_step(engine, step)
        ours = engine.state_dict()
        assert [key for key, value in expected.items() if not torch.equal(ours[key], value)] == []


def test_state_dict_is_laid_out_as_torchs(nvme: Path) -> None:
    """C63: keys, numbering and values are those of torch.optim.AdamW after the same steps."""
    model = ODD_MLP.build()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    with open_engine(ODD_MLP.build(), config(nvme, "AdamW")) as engine:
        for step in range(2):
            familiar_step(engine, step)
            model(*ODD_MLP.batches(step, 1)[0]).backward()
            theirs.step()
            theirs.zero_grad()
        ours, expected = engine.optimizer.state_dict(), theirs.state_dict()
        assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in expected["param_groups"]]
        assert ours["state"].keys() == expected["state"].keys()
        for number, state in expected["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for key, value in state.items():
                assert torch.allclose(ours["state"][number][key], value, rtol=1e-4, atol=1e-7), (number, key)
        theirs.load_state_dict(ours)  # torch takes it as its own


def test_a_state_that_is_anothers_is_refused(nvme: Path) -> None:
    """Other groups, and a state with the keys of another optimizer, are errors that name both; a closure is one, too."""
    with open_engine(ODD_MLP.build(), config(nvme, "AdamW")) as engine:
        familiar_step(engine, 0)
        state = engine.optimizer.state_dict()
        with pytest.raises(ModelError, match=r"groups of \[1\] parameters, not \[7\]"):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        state["state"][0] = {"momentum_buffer": torch.zeros(1)}
        with pytest.raises(ModelError, match="has momentum_buffer; its optimizer keeps exp_avg, exp_avg_sq"):
            engine.optimizer.load_state_dict(state)
        with pytest.raises(ConfigError, match="closure"):
            engine.optimizer.step(lambda: None)  # type: ignore[arg-type]
    with open_engine(TINY_GPT.build(), config(nvme, "SGD")) as engine:
        assert engine.optimizer.state_dict()["state"] == {}
