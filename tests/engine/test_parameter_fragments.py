"""Masters, moments and gradients of single parameters, read and written through the names of infinity.utils."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import LORA_GPT, ODD_MLP, TINY_GPT, Kit, open_engine, require_same_state, settings
from torch import nn

import infinity
from infinity import utils
from infinity.engine import Engine
from infinity.errors import IllegalTransition, ModelError

TIERS = [("nvme", "nvme"), ("cpu", "cpu"), ("nvme", "cpu")]
STATES = ("fp32", "exp_avg", "exp_avg_sq")
Edit = Callable[[Engine, int], None]


def spilled(config: dict[str, Any]) -> infinity.Placement:
    """Also the waiting gradients on NVMe, where everything else is."""
    return infinity.Placement.from_config(infinity.Config.from_any(config)).override("*", grads="nvme")


def run(kit: Kit, config: dict[str, Any], edit: Edit, *, spill: bool = False, num_steps: int = 3) -> dict[str, torch.Tensor]:
    """Train with the familiar loop, call `edit` between backward and step, and return every state of every parameter."""
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    with open_engine(kit.build(), config, placement=spilled(config) if spill else None) as engine:
        for step in range(num_steps):
            for batch in kit.batches(step, config["gradient_accumulation_steps"], dtype):
                engine.backward(engine(*batch))
            edit(engine, step)
            engine.step()
        return states_of(engine)


def states_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        f"{name} {state}": value
        for name, parameter in engine.module.named_parameters()
        for state in STATES
        if (value := utils.safe_get_full_optimizer_state(parameter, state)) is not None
    }


def parameter_of(engine: Engine, name: str) -> nn.Parameter:
    return engine.module.get_parameter(name)


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_states_are_those_of_torch(tiers: tuple[str, str], num_micro_batches: int, nvme: Path) -> None:
    """fp32 master, moments and gradient of every parameter, element by element, against torch.optim.AdamW."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=False, num_micro_batches=num_micro_batches, clip=0.0)
    model = ODD_MLP.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    with open_engine(ODD_MLP.build(), config) as engine:
        for step in range(3):
            batches = ODD_MLP.batches(step, num_micro_batches)
            for batch in batches:
                engine.backward(engine(*batch))
                (model(*batch) / num_micro_batches).backward()
            for name, parameter in engine.module.named_parameters():
                expected = model.get_parameter(name).grad
                assert expected is not None
                torch.testing.assert_close(utils.safe_get_full_grad(parameter), expected, rtol=1e-4, atol=1e-6)
                local = utils.safe_get_local_grad(parameter)
                assert local is not None
                assert torch.equal(local, utils.safe_get_full_grad(parameter).flatten())  # type: ignore[union-attr]
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in engine.module.named_parameters():
            theirs = model.get_parameter(name)
            torch.testing.assert_close(utils.safe_get_full_fp32_param(parameter), theirs.detach(), rtol=1e-4, atol=1e-5)
            for state in STATES[1:]:
                ours = utils.safe_get_full_optimizer_state(parameter, state)
                torch.testing.assert_close(ours, optimizer.state[theirs][state], rtol=1e-4, atol=1e-7)
                assert torch.equal(utils.safe_get_local_optimizer_state(parameter, state), ours.flatten())  # type: ignore


def edit_everything(engine: Engine, step: int) -> None:
    """Write a gradient, a master and a moment, full and local ones."""
    first = parameter_of(engine, "blocks.0.up.weight")
    gradient = utils.safe_get_full_grad(first)
    assert gradient is not None
    utils.safe_set_full_grad(first, gradient * 0.5)
    assert torch.equal(utils.safe_get_full_grad(first), gradient * 0.5)  # type: ignore[arg-type]
    second = parameter_of(engine, "norm.weight")
    local = utils.safe_get_local_grad(second)
    assert local is not None
    utils.safe_set_local_grad(second, torch.zeros_like(local))
    if step == 1:
        master = utils.safe_get_full_fp32_param(first)
        assert master is not None
        utils.safe_set_full_fp32_param(first, master * 1.0001)
        assert torch.equal(utils.safe_get_full_fp32_param(first), master * 1.0001)  # type: ignore[arg-type]
        embedding = parameter_of(engine, "embed.weight")
        moment = utils.safe_get_local_optimizer_state(embedding, "exp_avg")
        assert moment is not None
        utils.safe_set_local_optimizer_state(embedding, moment + 1e-4, "exp_avg")
        assert torch.equal(utils.safe_get_local_optimizer_state(embedding, "exp_avg"), moment + 1e-4)  # type: ignore
        utils.safe_set_full_optimizer_state(second, torch.full(second.shape, 1e-3), "exp_avg_sq")


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_edits_mean_the_same_on_every_tier(bf16: bool, num_micro_batches: int, nvme: Path) -> None:
    """C75: gradients, masters and moments edited before step: all states afterwards are equal bit for bit on all tiers."""
    runs = []
    for tiers, spill in (
        (("cpu", "cpu"), False),
        (("nvme", "nvme"), False),
        (("nvme", "nvme"), True),
        (("nvme", "cpu"), False),
    ):
        config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=bf16, num_micro_batches=num_micro_batches)
        runs.append(run(TINY_GPT, config, edit_everything, spill=spill))
    for other in runs[1:]:
        require_same_state(other, runs[0])
    untouched = run(TINY_GPT, settings(nvme, bf16=bf16, num_micro_batches=num_micro_batches), lambda engine, step: None)
    assert not torch.equal(untouched["blocks.0.up.weight fp32"], runs[0]["blocks.0.up.weight fp32"])


@pytest.mark.parametrize("spill", [False, True], ids=["resident", "spilled"])
def test_norm_and_update_use_the_edited_gradient(spill: bool, nvme: Path) -> None:
    """C75, C73: one gradient is zeroed before step: it leaves the norm, and its parameter's first moment stays zero."""
    config = settings(nvme, optim="nvme", params="nvme", bf16=False, clip=0.0)
    model = TINY_GPT.build()
    model(*TINY_GPT.batches(0, 1)[0]).backward()
    name = "blocks.1.down.weight"
    with open_engine(TINY_GPT.build(), config, placement=spilled(config) if spill else None) as engine:
        engine.backward(engine(*TINY_GPT.batches(0, 1)[0]))
        parameter = parameter_of(engine, name)
        utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape))
        engine.step()
        moment = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert moment is not None
        assert not moment.any()
        model.get_parameter(name).grad = None
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert engine.get_global_grad_norm() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("spill", [False, True], ids=["resident", "spilled"])
def test_an_injected_infinity_touches_nothing(spill: bool, nvme: Path) -> None:
    """C77: +inf in one element before step: the step is skipped, said and counted, and no state differs by a bit."""
    config = settings(nvme, optim="nvme", params="nvme")
    with open_engine(TINY_GPT.build(), config, placement=spilled(config) if spill else None) as engine:
        for step in range(2):
            engine.backward(engine(*TINY_GPT.batches(step, 1, torch.bfloat16)[0]))
            engine.step()
        before = states_of(engine)
        engine.backward(engine(*TINY_GPT.batches(2, 1, torch.bfloat16)[0]))
        parameter = parameter_of(engine, "blocks.0.qkv.weight")
        gradient = utils.safe_get_full_grad(parameter)
        assert gradient is not None
        gradient[3, 5] = float("inf")
        utils.safe_set_full_grad(parameter, gradient)
        engine.step()
        assert (engine.global_steps, engine.skipped_steps, engine.was_step_applied()) == (3, 1, False)
        require_same_state(states_of(engine), before)
        engine.backward(engine(*TINY_GPT.batches(2, 1, torch.bfloat16)[0]))
        engine.step()
        assert engine.was_step_applied()


def test_an_infinity_that_is_taken_out_does_not_skip(nvme: Path) -> None:
    """A gradient that is made finite again before step is applied, and an infinity elsewhere is named where it is."""
    with open_engine(TINY_GPT.build(), settings(nvme, bf16=False, optim="nvme", params="nvme")) as engine:
        engine.backward(engine(*TINY_GPT.batches(0, 1)[0]))
        parameter = parameter_of(engine, "blocks.0.qkv.weight")
        utils.safe_set_full_grad(parameter, torch.full(parameter.shape, float("nan")))
        utils.safe_set_full_grad(parameter, torch.ones(parameter.shape))
        engine.step()
        assert engine.was_step_applied()


def test_what_a_parameter_does_not_have_is_none(nvme: Path) -> None:
    """A frozen parameter has a master but no moments and no gradient; its weight can be read and written."""
    config = settings(nvme, optim="nvme", params="nvme", bf16=False)
    with open_engine(LORA_GPT.build(), config) as engine:
        engine.backward(engine(*LORA_GPT.batches(0, 1)[0]))
        frozen = parameter_of(engine, "blocks.0.up.weight")
        assert utils.safe_get_full_grad(frozen) is None
        assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
        with pytest.raises(IllegalTransition, match="no gradient in this step"):
            utils.safe_set_full_grad(frozen, torch.zeros(frozen.shape))
        with pytest.raises(ModelError, match="is frozen"):
            utils.safe_set_full_optimizer_state(frozen, torch.zeros(frozen.shape), "exp_avg")
        value = torch.full(frozen.shape, 0.25)
        utils.safe_set_full_fp32_param(frozen, value)
        assert torch.equal(utils.safe_get_full_fp32_param(frozen), value)  # type: ignore[arg-type]
        assert torch.equal(engine.state_dict()["blocks.0.up.weight"], value)


def test_wrong_moments_and_values_are_named(nvme: Path) -> None:
    """Before the last backward, between forward and backward, another shape or name, no engine: each is one sentence."""
    with open_engine(TINY_GPT.build(), settings(nvme, num_micro_batches=2, optim="nvme", params="nvme")) as engine:
        parameter = parameter_of(engine, "norm.bias")
        batches = TINY_GPT.batches(0, 2, torch.bfloat16)
        with pytest.raises(IllegalTransition, match="0 of 2 backward"):
            utils.safe_get_full_grad(parameter)
        loss = engine(*batches[0])
        with pytest.raises(IllegalTransition, match="between a forward and its backward"):
            utils.safe_set_full_fp32_param(parameter, torch.zeros(48))
        engine.backward(loss)
        with pytest.raises(IllegalTransition, match="1 of 2 backward"):
            utils.safe_get_full_grad(parameter)
        engine.backward(engine(*batches[1]))
        assert utils.safe_get_full_grad(parameter) is not None
        late = engine(*batches[1])
        with pytest.raises(IllegalTransition, match="read or set"):
            late.backward()
        engine.step()
        with pytest.raises(ModelError, match=r"shape \(47,\).*has \(48,\)"):
            utils.safe_set_full_optimizer_state(parameter, torch.zeros(47), "exp_avg")
        with pytest.raises(ModelError, match="no optimizer state 'momentum'"):
            utils.safe_get_full_optimizer_state(parameter, "momentum")
        with pytest.raises(ModelError, match="no open engine"):
            utils.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2)))
    with pytest.raises(ModelError, match="no open engine"):
        utils.safe_get_full_fp32_param(parameter)
