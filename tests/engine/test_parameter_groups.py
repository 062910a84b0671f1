"""Parameter groups with their own hyper-parameters, and optimizers of torch that the user brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import LORA_GPT, ODD_MLP, TINY_GPT, open_engine, settings
from torch import nn

from infinity.engine import Engine, initialize
from infinity.errors import ConfigError

TIERS = [("nvme", "nvme"), ("cpu", "cpu")]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as users write them: no decay and other betas for vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.2},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6, "name": "vectors"},
    ]


def compare_with_torch(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        batch = ODD_MLP.batches(step, 1)[0]
        engine.train_batch([batch])
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.state_dict().items():
        near = torch.isclose(value, model.state_dict()[name], rtol=1e-4, atol=2e-6)
        assert near.double().mean() > 0.999  # but for elements whose gradient and decay cancel out, which Adam makes large


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_each_group_has_its_own_hyper_parameters(tiers: tuple[str, str], nvme: Path) -> None:
    """Weight decay, betas and eps of two groups give the weights that torch.optim.AdamW gives with the same groups."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=False, lr=1e-3)
    model, ours = ODD_MLP.build(), ODD_MLP.build()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-3, foreach=False)
    with open_engine(ours, config, model_parameters=grouped(ours)) as engine:
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.2, 0.0]
        assert engine.optimizer.param_groups[1]["name"] == "vectors"
        held = {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in engine.module.parameters()}
        compare_with_torch(engine, model, optimizer)


@pytest.mark.parametrize("as_function", [False, True], ids=["object", "function"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_an_adam_of_torch_is_taken_over(kind: type[torch.optim.Optimizer], as_function: bool, nvme: Path) -> None:
    """Its groups and its way of decaying weights are used, whatever the configuration says, with a note."""
    config = settings(nvme, optim="nvme", params="nvme", bf16=False, lr=1e-3, weight_decay=0.9)
    model, ours = ODD_MLP.build(), ODD_MLP.build()
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "foreach": False}
    given: Any = (lambda groups: kind(groups, **options)) if as_function else kind(ours.parameters(), **options)
    with open_engine(ours, config, optimizer=given) as engine:
        assert any(f"the {kind.__name__} given to initialize" in note for note in engine.notes)
        compare_with_torch(engine, model, kind(model.parameters(), **options))


def test_frozen_parameters_need_no_group(nvme: Path) -> None:
    """The usual filter over requires_grad, as a generator, is every parameter that is trained."""
    model = LORA_GPT.build()
    trained = filter(lambda parameter: parameter.requires_grad, model.parameters())
    with open_engine(model, settings(nvme), model_parameters=trained) as engine:
        engine.train_batch(LORA_GPT.batches(0, 1, torch.bfloat16))
        assert engine.was_step_applied()


def test_what_cannot_be_trained_as_asked_is_refused(nvme: Path) -> None:
    """An Adam that has taken steps, groups that do not fit the model: each error names what is wrong."""
    model, other = TINY_GPT.build(), nn.Linear(2, 2)
    parameters = list(model.parameters())
    stepped = torch.optim.AdamW(parameters)
    parameters[0].grad = torch.zeros_like(parameters[0])
    stepped.step()
    for given, words in (
        ({"optimizer": stepped}, "taken steps"),
        ({"model_parameters": parameters[1:]}, "1 trainable parameters are in no group.*embed.weight"),
        ({"model_parameters": [*parameters, *other.parameters()]}, "no parameter of the model"),
        ({"model_parameters": [*parameters, parameters[0]]}, "given twice"),
        ({"model_parameters": [{"params": parameters, "momentum": 0.9}]}, "'momentum'"),
    ):
        with pytest.raises(ConfigError, match=words):
            initialize(model=model, config=settings(nvme), **given)  # type: ignore[arg-type]
    assert list(nvme.iterdir()) == []
    model(*TINY_GPT.batches(0, 1)[0]).backward()  # it is as it was


def test_a_group_that_is_added_later_is_refused(nvme: Path) -> None:
    """Groups are fixed by initialize: one more is an error of the next step, which is then not taken."""
    with open_engine(ODD_MLP.build(), settings(nvme, bf16=False)) as engine:
        engine.optimizer.param_groups.append({"params": [], "lr": 1.0})
        with pytest.raises(ConfigError, match="2 groups"):
            engine.train_batch(ODD_MLP.batches(0, 1))
        assert engine.global_steps == 0
