"""A bf16 base with fp32 adapters and an fp32 layer norm trains with each parameter in its own dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conformance_backward import seeded
from conformance_dtypes import MixedGpt, mixed_dtypes
from kit import TINY_GPT, Kit, open_engine, require_same_state, settings, train_engine
from torch import nn

from infinity.zero import GatheredParameters

KIT = Kit("mixed-gpt", seeded(MixedGpt), TINY_GPT.micro_batch)


def test_each_parameter_keeps_its_dtype_in_every_tier(nvme: Path) -> None:
    """C101: forward, optimizer, RAM and NVMe: the same bits in every tier, and torch's gradients and masters to rounding."""
    runs = [
        mixed_dtypes(str(nvme), optim=optim, params=params)
        for optim, params in (("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "cpu"))
    ]
    for other in runs[1:]:
        require_same_state(other, runs[0])


def test_a_checkpoint_keeps_the_dtypes(nvme: Path, tmp_path: Path) -> None:
    """C101: saved on NVMe, loaded in RAM: the steps that follow are bit for bit those of the run that went on."""
    config = settings(nvme, optim="nvme", params="nvme")
    with open_engine(KIT.build(), config) as engine:
        train_engine(engine, KIT, config, range(2))
        path = engine.save_checkpoint(tmp_path / "checkpoints")
        expected = train_engine(engine, KIT, config, range(2, 4))
    config = settings(nvme, optim="cpu", params="cpu")
    with open_engine(KIT.build(1), config) as engine:
        engine.load_checkpoint(path)
        run = train_engine(engine, KIT, config, range(2, 4))
    assert run.losses == expected.losses
    require_same_state(run.state, expected.state)


def test_weights_of_fp32_parameters_are_exact(nvme: Path) -> None:
    """An fp32 weight is its master, a bf16 weight half of it; both are seen as what they are, also when they are absent."""
    with open_engine(KIT.build(), settings(nvme, optim="nvme", params="nvme")) as engine:
        engine.train_batch(TINY_GPT.batches(0, 1))
        masters = engine.state_dict()
        for name, parameter in engine.module.named_parameters():
            with GatheredParameters(parameter):
                if parameter.dtype is torch.float32:
                    assert torch.equal(parameter, masters[name]), name
                else:
                    torch.testing.assert_close(parameter.float(), masters[name], rtol=2**-8, atol=0.0)


def dtypes_of(model: nn.Module, nvme: Path, *, bf16: bool = True) -> Iterator[torch.dtype]:
    with open_engine(model, settings(nvme, bf16=bf16)) as engine:
        yield from {parameter.dtype for parameter in engine.module.parameters()}


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_a_model_of_one_dtype_gets_the_runs(bf16: bool, nvme: Path) -> None:
    """What is not mixed, or has nothing in the run's precision, is converted to it as ever."""
    wanted = torch.bfloat16 if bf16 else torch.float32
    assert list(dtypes_of(TINY_GPT.build(), nvme, bf16=bf16)) == [wanted]
    assert list(dtypes_of(TINY_GPT.build().bfloat16(), nvme, bf16=bf16)) == [wanted]
    half = TINY_GPT.build().half()
    half.get_submodule("norm").to(torch.bfloat16 if not bf16 else torch.float32)
    assert list(dtypes_of(half, nvme, bf16=bf16)) == [wanted]
