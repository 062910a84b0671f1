"""GatheredParameters: absent parameters used as tensors for the time of a block, and what becomes of writes there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same_state, settings, train_engine
from torch import nn

import infinity
from infinity import utils
from infinity.engine import Engine
from infinity.errors import AbsentParameterError, IllegalTransition, ModelError

NVME = {"optim": "nvme", "params": "nvme"}
NAME = "blocks.0.up.weight"


def weight_of(engine: Engine, name: str = NAME) -> nn.Parameter:
    return engine.module.get_parameter(name)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_absent_parameters_are_tensors_inside_the_block(bf16: bool, nvme: Path) -> None:
    """Values, slices, reductions, copies: those of the compute weights; outside the block using them is an error again."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    expected = TINY_GPT.build().get_parameter(NAME).detach().to(dtype)
    with open_engine(TINY_GPT.build(), settings(nvme, bf16=bf16, **NVME)) as engine:
        weight = weight_of(engine)
        with infinity.zero.GatheredParameters(list(engine.module.parameters())):
            assert torch.equal(weight, expected)
            assert torch.equal(weight[3:5] * 2, expected[3:5] * 2)
            assert weight.data.sum() == expected.sum()
            assert torch.equal(copy.deepcopy(weight), expected)
            assert all(torch.isfinite(parameter).all() for parameter in engine.module.parameters())
        with pytest.raises(AbsentParameterError, match="GatheredParameters"):
            weight.sum()
        assert not [line for line in engine.memory_report() if line.owner == "gathered parameters" and line.used_bytes]


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_a_modifier_rank_keeps_what_is_written(bf16: bool, nvme: Path) -> None:
    """In place, through .data and by an initialiser: master and weight are what was written; all others keep every bit."""
    results = []
    for tiers in (("nvme", "nvme"), ("cpu", "cpu")):
        config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=bf16)
        with open_engine(TINY_GPT.build(), config) as engine:
            train_engine(engine, TINY_GPT, config, range(2))
            before = engine.state_dict()
            with infinity.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0), torch.no_grad():
                nn.init.constant_(weight_of(engine), 0.125)
                weight_of(engine, "norm.bias").data.add_(1.0)
                weight_of(engine, "blocks.1.out.weight").data[0] = 3.0
            after = engine.state_dict()
            assert (after[NAME] == 0.125).all()
            assert (after["blocks.1.out.weight"][0] == 3.0).all()
            changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
            assert changed == {NAME, "norm.bias", "blocks.1.out.weight"}
            results.append(train_engine(engine, TINY_GPT, config, range(2, 4)).state)
    require_same_state(results[1], results[0])


def test_a_write_without_a_modifier_rank_is_said_and_lost(nvme: Path) -> None:
    """The block ends with an error that names the parameter, and every state is as before."""
    with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
        before = engine.state_dict()
        with (
            pytest.raises(IllegalTransition, match=rf"{NAME} was written .* without a modifier_rank"),
            infinity.zero.GatheredParameters([weight_of(engine)]),
        ):
            weight_of(engine).data.zero_()
        require_same_state(engine.state_dict(), before)
        with infinity.zero.GatheredParameters([weight_of(engine)]):  # usable again
            assert weight_of(engine).any()


def test_a_failing_block_keeps_nothing(nvme: Path) -> None:
    """The user's exception passes through; half an edit is no edit."""
    with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
        before = engine.state_dict()
        with pytest.raises(IndexError), infinity.zero.GatheredParameters(weight_of(engine), modifier_rank=0):
            weight_of(engine).data.zero_()[10_000]
        require_same_state(engine.state_dict(), before)


def test_misuse_of_the_block_is_named(nvme: Path) -> None:
    """Nesting over one parameter, another shape, a forward whose backward is to come, a parameter of nobody."""
    with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
        weight = weight_of(engine)
        with infinity.zero.GatheredParameters(weight):
            with pytest.raises(IllegalTransition, match="gathered already"), infinity.zero.GatheredParameters(weight):
                pass
            assert weight.any()
        with pytest.raises(ModelError, match="was given"), infinity.zero.GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(3)
        loss = engine(*TINY_GPT.batches(0, 1, torch.bfloat16)[0])
        with (
            pytest.raises(IllegalTransition, match="between a forward and its backward"),
            infinity.zero.GatheredParameters(weight, modifier_rank=0),
        ):
            weight.data.zero_()
        engine.backward(loss)
        engine.step()
        assert utils.safe_get_full_fp32_param(weight).any()  # type: ignore[union-attr]
        with infinity.zero.GatheredParameters(weight, enabled=False), pytest.raises(AbsentParameterError):
            weight.sum()
