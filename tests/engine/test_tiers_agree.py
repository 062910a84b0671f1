"""Where states live and in which order micro-batches run changes no bit of losses, weights or master values."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import BRANCHY, BULK, DROPOUT_GPT, KITS, TINY_GPT, Kit, Run, kit_of, require_same, settings, train, train_familiarly

from infinity.config import Config
from infinity.placement import Placement

NVME = {"optim": "nvme", "params": "nvme"}
_REFERENCES: dict[tuple[str, bool, int, float], Run] = {}


def reference(kit: Kit, nvme: Path, *, bf16: bool, num_micro_batches: int, clip: float = 1.0) -> Run:
    """Return the run with everything in RAM, in vertical order."""
    key = (kit.name, bf16, num_micro_batches, clip)
    if key not in _REFERENCES:
        _REFERENCES[key] = train(kit, settings(nvme, bf16=bf16, num_micro_batches=num_micro_batches, clip=clip))
    return _REFERENCES[key]


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("bf16", "tiers"),
    [(True, ("nvme", "nvme")), (True, ("nvme", "cpu")), (True, ("cpu", "nvme")), (False, ("nvme", "nvme"))],
    ids=["bf16-nvme-nvme", "bf16-nvme-cpu", "bf16-cpu-nvme", "fp32-nvme-nvme"],
)
@pytest.mark.parametrize("name", [kit.name for kit in KITS])
def test_nvme_equals_cpu(name: str, bf16: bool, num_micro_batches: int, tiers: tuple[str, str], nvme: Path) -> None:
    """Optimizer state, weights or both on NVMe: every bit is that of a run in RAM."""
    kit, optim_params = kit_of(name), {"optim": tiers[0], "params": tiers[1]}
    run = train(kit, settings(nvme, bf16=bf16, num_micro_batches=num_micro_batches, **optim_params))
    require_same(run, reference(kit, nvme, bf16=bf16, num_micro_batches=num_micro_batches))
    assert run.counters["nvme_read_bytes"] > 0


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", [kit.name for kit in KITS])
def test_horizontal_equals_vertical(name: str, bf16: bool, tiers: tuple[str, str], nvme: Path) -> None:
    """Four micro-batches through the whole model one by one, or side by side: the sums have one order."""
    kit = kit_of(name)
    horizontal = settings(nvme, bf16=bf16, num_micro_batches=4, optim=tiers[0], params=tiers[1], schedule="horizontal")
    require_same(train(kit, horizontal), reference(kit, nvme, bf16=bf16, num_micro_batches=4))


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("kit", [TINY_GPT, DROPOUT_GPT, BRANCHY], ids=lambda kit: kit.name)
def test_familiar_loop_equals_train_batch(kit: Kit, num_micro_batches: int, tiers: tuple[str, str], nvme: Path) -> None:
    """forward, backward and step, called A times, give the bits of one train_batch with A micro-batches."""
    config = settings(nvme, num_micro_batches=num_micro_batches, optim=tiers[0], params=tiers[1])
    run = train_familiarly(kit, config)
    require_same(run, reference(kit, nvme, bf16=True, num_micro_batches=num_micro_batches))


@pytest.mark.parametrize("clip", [0.0, 1e-2])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_clipping_agrees(clip: float, num_micro_batches: int, nvme: Path) -> None:
    """Clipping off or biting hard: NVMe equals RAM, and the two settings differ from each other."""
    config = settings(nvme, clip=clip, num_micro_batches=num_micro_batches, **NVME)
    run = train(TINY_GPT, config)
    require_same(run, reference(TINY_GPT, nvme, bf16=True, num_micro_batches=num_micro_batches, clip=clip))
    coefficients = {result.clip_coefficient for result in run.results}
    assert all(0 < coefficient < 1 for coefficient in coefficients) if clip else coefficients == {1.0}


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_mixed_shares_agree(params: str, bf16: bool, schedule: str, nvme: Path) -> None:
    """Half of each unit's tiles in RAM and half on NVMe, from a pattern of the Python interface."""
    config = settings(nvme, bf16=bf16, num_micro_batches=4, schedule=schedule)
    half = Placement.from_config(Config.from_any(config)).override(
        "blocks.[01]", optim={"cpu": 0.5, "nvme": 0.5}, params=params
    )
    run = train(TINY_GPT, config, placement=half)
    require_same(run, reference(TINY_GPT, nvme, bf16=bf16, num_micro_batches=4))
    assert run.counters["nvme_read_bytes"] > 0


def test_one_unit_of_each_kind_agrees(nvme: Path) -> None:
    """Units that differ in every state's tier, spilled gradients among them, live side by side in one model."""
    config = settings(nvme, num_micro_batches=4)
    placement = (
        Placement.from_config(Config.from_any(config))
        .override("layers.[0-4]", optim="nvme", params="nvme", grads="nvme")
        .override("layers.[5-9]", optim="nvme", params="cpu", grads="nvme")
        .override("layers.1[0-4]", optim="cpu", params="nvme")
        .override("layers.1[5-9]", optim={"cpu": 0.5, "nvme": 0.5}, params="cpu")
        .override("layers.2[0-3]", optim="cpu", params="cpu", grads="nvme")
    )
    run = train(BULK, config, placement=placement)
    require_same(run, reference(BULK, nvme, bf16=True, num_micro_batches=4))
    assert run.counters["gradient_spill_bytes"] > 0
