"""Training in fp16: an fp32 master on the tiles, scaled gradients, and the same bits wherever the states live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BRANCHY,
    DROPOUT_GPT,
    LORA_GPT_EMBEDDING,
    ODD_MLP,
    TINY_GPT,
    Kit,
    Run,
    TinyGpt,
    open_engine,
    require_same,
    settings,
    train,
    train_engine,
    train_familiarly,
)
from torch import nn

from infinity.config import Config
from infinity.optim.hyper import AdamHyper
from infinity.optim.reference import adam_update_
from infinity.placement import Placement

NVME = {"optim": "nvme", "params": "nvme"}
SCALE = {"initial_scale_power": 12, "loss_scale_window": 2}  # grows within the runs below
KITS = [DROPOUT_GPT, ODD_MLP, LORA_GPT_EMBEDDING, BRANCHY]
_REFERENCES: dict[str, Run] = {}


def reference(kit: Kit, nvme: Path) -> Run:
    """Return the run of four micro-batches with everything in RAM, in vertical order."""
    if kit.name not in _REFERENCES:
        _REFERENCES[kit.name] = train(kit, settings(nvme, fp16=SCALE, num_micro_batches=4))
    return _REFERENCES[kit.name]


@pytest.mark.parametrize("own", [{}, {"schedule": "horizontal"}], ids=["vertical", "horizontal"])
@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)
def test_nvme_and_either_order_equal_ram(kit: Kit, own: Mapping[str, Any], nvme: Path) -> None:
    """Everything on NVMe, in both orders of work: every bit is that of a run in RAM; the scale has moved on the way."""
    run = train(kit, settings(nvme, fp16=SCALE, num_micro_batches=4, **NVME, **own))
    require_same(run, reference(kit, nvme))
    assert [result.loss_scale for result in run.results] == [4096, 4096, 8192]
    assert not any(result.skipped for result in run.results)
    assert run.counters["nvme_read_bytes"] > 0


def test_mixed_shares_and_the_familiar_loop_agree(nvme: Path) -> None:
    """Half of the tiles on NVMe with spilled gradients; forward, backward and step called A times."""
    config = settings(nvme, fp16=SCALE, num_micro_batches=4)
    half = Placement.from_config(Config.from_any(config)).override(
        "blocks.[01]", optim={"cpu": 0.5, "nvme": 0.5}, params="nvme", grads="nvme"
    )
    require_same(train(DROPOUT_GPT, config, placement=half), reference(DROPOUT_GPT, nvme))
    require_same(train_familiarly(DROPOUT_GPT, config), reference(DROPOUT_GPT, nvme))


def test_a_tile_has_twelve_bytes_a_parameter(nvme: Path) -> None:
    """The plan knows what the store keeps: master and moments in fp32, weights in fp16."""
    with open_engine(nn.Sequential(nn.Linear(256, 256, bias=False)), settings(nvme, fp16=SCALE, **NVME)) as engine:
        sizes = {line.what: line.num_bytes for line in engine.plan.disk}
        assert sizes["optimizer state"] >= 256 * 256 * 12
        assert sizes["optimizer state"] < 256 * 256 * 12 + 4096 * 60
        assert sizes["weights"] == 256 * 256 * 2


class Oracle:
    """A plain torch fp16 model with an fp32 master: gradients of the scaled loss, rounded to fp16 once."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        self.master = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.master.items()}
        self.model = model.half()
        self.scale = scale
        self.step_count = 0

    def gradients(self, micro_batches: list[Any]) -> tuple[tuple[float, ...], dict[str, torch.Tensor]]:
        """Return the losses and the scaled gradients."""
        sums: dict[str, torch.Tensor] = {}
        losses = []
        for micro_batch in micro_batches:
            self.model.zero_grad()
            loss = self.model(*micro_batch)
            (loss * (self.scale / len(micro_batches))).backward()
            losses.append(float(loss.detach()))
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums.get(name, 0.0) + parameter.grad.float()
        return tuple(losses), {name: total.half() for name, total in sums.items()}

    def update(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        self.step_count += 1
        hyper = AdamHyper(lr, 0.9, 0.999, 1e-8, 0.1, self.step_count, decoupled=True)
        for name, gradient in gradients.items():
            adam_update_(self.master[name], *self.moments[name], gradient, hyper, 1.0 / self.scale)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])


UNTIED_GPT = Kit("untied-gpt", lambda: TinyGpt(tied=False), TINY_GPT.micro_batch)


@pytest.mark.parametrize("kit", [UNTIED_GPT, ODD_MLP], ids=lambda kit: kit.name)
def test_oracle_bit_for_bit(kit: Kit, nvme: Path) -> None:
    """Twelve steps on NVMe: losses, norms and masters of plain torch in fp16; weights are the masters rounded to even."""
    config = settings(nvme, fp16={"loss_scale": 1024}, num_micro_batches=4, clip=0.0, lr=1e-2, **NVME)
    oracle = Oracle(kit.build(), 1024.0)
    with open_engine(kit.build(), config) as engine:
        for step in range(12):
            micro_batches = kit.batches(step, 4, torch.float16)
            result = engine.train_batch(micro_batches)
            losses, gradients = oracle.gradients(micro_batches)
            norm = float(sum((g.double() / 1024).square().sum() for g in gradients.values()) ** 0.5)
            oracle.update(gradients, 1e-2)
            assert result.losses == losses
            assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        state = engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in oracle.master.items())


def test_one_update_is_torchs_to_four_ulp(nvme: Path) -> None:
    """From equal states and gradients: torch.optim.AdamW on the unscaled gradient moves the fp32 master as we do."""
    config = settings(nvme, fp16={"loss_scale": 4096}, clip=0.0, lr=1e-2, **NVME)
    oracle = Oracle(UNTIED_GPT.build(), 4096.0)
    batch = UNTIED_GPT.batches(0, 1, torch.float16)
    with open_engine(UNTIED_GPT.build(), config) as engine:
        engine.train_batch(batch)
        state = engine.state_dict()
    masters = {name: nn.Parameter(value) for name, value in oracle.master.items()}
    before = {name: value.detach().clone() for name, value in masters.items()}
    for name, gradient in oracle.gradients(batch)[1].items():
        masters[name].grad = gradient.float() / 4096
    torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.1, foreach=False).step()
    for name, expected in masters.items():
        largest = torch.maximum(before[name].abs(), expected.detach().abs())
        ulp = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
        assert bool(((state[name] - expected.detach()).abs() <= 4 * ulp).all()), name


class Faint(nn.Module):
    """One layer whose gradient has about 2e-9 an element: below everything that fp16 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def faint_loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.float().sum() * 2e-9


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_small_gradients_survive_when_the_loss_is_scaled(tiers: tuple[str, str], nvme: Path) -> None:
    """The scale is there before the first fp16 gradient is: also where the loss is computed outside the module."""
    batch = torch.ones(1, 8, dtype=torch.float16)
    norms = {}
    for power in (0, 16):
        config = settings(nvme, optim=tiers[0], params=tiers[1], fp16={"loss_scale": 2**power}, clip=0.0)
        with open_engine(Faint(), config) as engine:
            norms[power] = engine.train_batch([batch], loss_fn=faint_loss).grad_norm
            engine.backward(faint_loss(engine(batch), None))
            engine.step()
            assert engine.get_global_grad_norm() == norms[power]
    assert norms[0] == 0.0
    assert norms[16] == pytest.approx(8 * 2e-9, rel=1e-3)


def test_gradients_may_be_kept_in_fp32(nvme: Path) -> None:
    """`infinity.grad_dtype` is honoured on every tier; what was rounded to fp16 before differs."""
    runs = [
        train(TINY_GPT, settings(nvme, fp16=SCALE, num_micro_batches=4, grad_dtype="fp32", **tiers)) for tiers in ({}, NVME)
    ]
    require_same(runs[1], runs[0])
    rounded = train(TINY_GPT, settings(nvme, fp16=SCALE, num_micro_batches=4))
    assert any(not torch.equal(runs[0].state[name], value) for name, value in rounded.state.items())


def test_a_written_weight_is_the_new_master(nvme: Path) -> None:
    """What the user writes into a resident fp16 parameter is what training goes on from; all else keeps its bits."""
    name = "blocks.0.up.weight"
    with open_engine(TINY_GPT.build(), settings(nvme, fp16=SCALE, lr=1e-3, tile_bytes=960)) as engine:
        engine.train_batch(TINY_GPT.batches(0, 1, torch.float16))
        before = engine.state_dict()
        parameter = engine.module.get_parameter(name)
        with torch.no_grad():
            parameter.mul_(0.3)
        written = parameter.detach().clone()
        engine.train_batch(TINY_GPT.batches(1, 1, torch.float16))
        after = engine.state_dict()[name]
        assert torch.equal(engine.module.get_parameter(name), after.half())
        assert 0 < (after - written.float()).abs().max() < 5e-3
        with torch.no_grad():
            parameter.copy_(written)
        state = engine.state_dict()
        assert torch.equal(state[name], written.float())
        assert not torch.equal(before[name], state[name])


def test_saved_and_loaded_it_goes_on_bit_for_bit(nvme: Path, tmp_path: Path) -> None:
    """C104 in fp16: saved in RAM in the middle of a window after an overflow, loaded on NVMe with other tiles.

    The scale, what is left of the hysteresis and the steps of the window are those of the run that was never stopped.
    """
    fp16 = {"initial_scale_power": 28, "loss_scale_window": 3, "hysteresis": 3}
    config = settings(nvme, fp16=fp16, num_micro_batches=2)
    expected = train(DROPOUT_GPT, config, num_steps=24)
    scales = [result.loss_scale for result in expected.results]
    assert scales[0] > scales[18]
    assert max(scales[-6:]) > min(scales[-6:])
    for saved_at in (2, 20):  # in the middle of the hysteresis, and of a window
        with open_engine(DROPOUT_GPT.build(), config) as engine:
            before = train_engine(engine, DROPOUT_GPT, config, range(saved_at))
            path = engine.save_checkpoint(tmp_path / f"checkpoints-{saved_at}")
        other = settings(nvme, fp16=fp16, num_micro_batches=2, tile_bytes="5KiB", **NVME)
        with open_engine(DROPOUT_GPT.build(seed=9), other) as engine:
            engine.load_checkpoint(path)
            after = train_engine(engine, DROPOUT_GPT, other, range(saved_at, 24))
        assert [result.loss_scale for result in (*before.results, *after.results)] == scales
        after.losses = before.losses + after.losses
        require_same(after, expected)
