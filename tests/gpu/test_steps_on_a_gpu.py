"""Steps on a CUDA device: near the CPU's, one set of bits wherever states live, pinned, booked, and on the right device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    DROPOUT_GPT,
    LORA_GPT,
    ODD_MLP,
    TINY_GPT,
    Kit,
    Run,
    kit_of,
    open_engine,
    require_same,
    settings,
    train,
    train_engine,
    train_familiarly,
)

import infinity.engine.build as build
from infinity.memory.arena import open_arena
from infinity.memory.device import host_device, open_compute_device
from infinity.memory.ledger import Ledger
from infinity.placement import Owner
from infinity.states import Tier

pytestmark = pytest.mark.gpu

PLACEMENTS: dict[str, dict[str, Any]] = {
    "optimizer in ram": {"optim": "cpu", "params": "gpu"},
    "optimizer on nvme": {"optim": "nvme", "params": "gpu"},
    "weights in ram": {"optim": "cpu", "params": "cpu"},
    "weights on nvme": {"optim": "cpu", "params": "nvme"},
    "all on nvme": {"optim": "nvme", "params": "nvme"},
}
FIRST = "optimizer in ram"
LOSS_TOLERANCE = {True: 2e-2, False: 1e-4}  # relative, by whether it computes in bf16
WEIGHT_TOLERANCE = 1e-4  # absolute, fp32, under an eps that makes the update smooth in the gradient
_ON_GPU: dict[tuple[str, bool], Run] = {}


def first_on_gpu(kit: Kit, nvme: Path, *, bf16: bool) -> Run:
    """Return the deterministic run on the GPU with the weights there and the optimizer in RAM."""
    if (kit.name, bf16) not in _ON_GPU:
        config = settings(nvme, bf16=bf16, num_micro_batches=2, deterministic=True, **PLACEMENTS[FIRST])
        _ON_GPU[kit.name, bf16] = train(kit, config)
    return _ON_GPU[kit.name, bf16]


def on_cpu(kit: Kit, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return the run where the CPU computes."""
    with monkeypatch.context() as patched:
        patched.setattr(build, "open_compute_device", host_device)
        return train(kit, config)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fp32_steps_are_the_cpus_up_to_rounding(placement: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses agree to 1e-4 of themselves and every weight to 1e-4, after three steps."""
    config = settings(nvme, bf16=False, num_micro_batches=2, lr=0.1, **PLACEMENTS[placement])
    config["optimizer"]["params"]["eps"] = 1.0  # Adam divides small gradients by themselves: rounding would decide signs
    run, expected = train(TINY_GPT, config), on_cpu(TINY_GPT, config, monkeypatch)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected.losses), rtol=LOSS_TOLERANCE[False], atol=0)
    for name, value in expected.state.items():
        torch.testing.assert_close(run.state[name], value, rtol=0, atol=WEIGHT_TOLERANCE, msg=name)


@pytest.mark.parametrize("name", [TINY_GPT.name, ODD_MLP.name, LORA_GPT.name])
def test_bf16_losses_are_near_the_cpus(name: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses agree to 2 % over three steps."""
    kit, config = kit_of(name), settings(nvme, num_micro_batches=2, lr=1e-3, **PLACEMENTS[FIRST])
    run, expected = train(kit, config), on_cpu(kit, config, monkeypatch)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected.losses), rtol=LOSS_TOLERANCE[True], atol=0)


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != FIRST])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", [TINY_GPT.name, DROPOUT_GPT.name, ODD_MLP.name])
def test_tiers_change_no_bit_under_deterministic(name: str, bf16: bool, placement: str, nvme: Path) -> None:
    """Wherever states live, the same GPU computes the same bits."""
    kit = kit_of(name)
    config = settings(nvme, bf16=bf16, num_micro_batches=2, deterministic=True, **PLACEMENTS[placement])
    require_same(train(kit, config), first_on_gpu(kit, nvme, bf16=bf16))


def test_the_familiar_loop_has_the_same_bits_under_deterministic(nvme: Path) -> None:
    """forward, backward, step in horizontal order: weights of the vertical run."""
    config = settings(nvme, num_micro_batches=2, deterministic=True, **PLACEMENTS["weights in ram"])
    assert train_familiarly(TINY_GPT, config).losses == first_on_gpu(TINY_GPT, nvme, bf16=True).losses


def test_a_checkpoint_goes_on_bit_for_bit(nvme: Path) -> None:
    """Saved after a step, loaded into a new engine with another placement: the same bits as without."""
    config = settings(nvme, num_micro_batches=2, deterministic=True, **PLACEMENTS["all on nvme"])
    with open_engine(TINY_GPT.build(), config) as engine:
        train_engine(engine, TINY_GPT, config, range(1))
        saved = engine.save_checkpoint(nvme / "checkpoints")
    in_ram = settings(nvme, num_micro_batches=2, deterministic=True)
    with open_engine(TINY_GPT.build(seed=1), in_ram) as engine:
        engine.load_checkpoint(saved)
        run = train_engine(engine, TINY_GPT, in_ram, range(1, 3))
    expected = first_on_gpu(TINY_GPT, nvme, bf16=True)
    assert run.losses == expected.losses[1:]
    assert [name for name, value in expected.state.items() if not torch.equal(run.state[name], value)] == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_memory_on_the_gpu_is_booked_as_planned(placement: str, nvme: Path) -> None:
    """Weights, slots and gradients take what the plan says; torch's own allocations are measured; the budget holds."""
    config = settings(nvme, num_micro_batches=2, gpu_memory="256MiB", **PLACEMENTS[placement])
    with open_engine(TINY_GPT.build(), config) as engine:
        train_engine(engine, TINY_GPT, config, range(2))
        held = {(line.tier, line.owner): line.peak_bytes for line in engine.memory_report()}
        planned = {(line.tier, line.owner.value): line.num_bytes for line in engine.plan.memory}
        used = engine.ledger.used(Tier.GPU)
    for owner in (Owner.WEIGHTS, Owner.WEIGHT_SLOTS, Owner.GRADIENT_SLOTS):
        assert held.get((Tier.GPU, owner.value), 0) == planned.get((Tier.GPU, owner.value), 0), owner
    assert held[Tier.GPU, Owner.ACTIVATIONS.value] > 0
    assert used <= 256 << 20


def test_module_and_buffers_are_on_the_device(nvme: Path) -> None:
    """Parameters that stay, absent ones and buffers of both kinds report the CUDA device; resident ones hold the master."""
    config = settings(nvme, bf16=False, **PLACEMENTS[FIRST])
    with open_engine(TINY_GPT.build(), config) as engine:
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        assert {tensor.device for tensor in tensors} == {engine.device}
        train_engine(engine, TINY_GPT, config, range(1))
        shown = {name: value.detach().cpu() for name, value in engine.module.named_parameters()}
        full = dict(engine.full_parameters())
        assert [name for name, value in full.items() if not torch.equal(shown[name], value)] == []


def test_arenas_are_page_locked_for_torch_and_given_back() -> None:
    """A pinned arena is pinned memory in torch's eyes, copies in both directions keep every bit."""
    with open_arena(3 << 20, ledger=Ledger({}), tier=Tier.CPU, owner="test", pin=True) as arena:
        assert arena.pinned
        compute = open_compute_device()
        host, back = arena.buffer.tensor(torch.float32, 1 << 16), arena.buffer.tensor(torch.float32, 1 << 16, 1 << 20)
        assert host.is_pinned()
        host.copy_(torch.randn(1 << 16))
        there = torch.empty(1 << 16, device=compute.torch_device)
        compute.transfers.to_device(host, there).wait()
        compute.transfers.to_host(there, back).wait()
        assert torch.equal(host, back)
        compute.transfers.synchronize()
