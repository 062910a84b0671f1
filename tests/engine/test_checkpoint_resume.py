"""Saved and loaded, on any tier and tile size, training goes on bit for bit as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BRANCHY,
    DROPOUT_GPT,
    LORA_GPT,
    TINY_GPT,
    Kit,
    compute_dtype,
    kit_of,
    open_engine,
    require_same,
    settings,
    train,
)
from kit import train_engine as take
from torch import nn

from infinity.checkpoint.reader import Checkpoint
from infinity.config import Config
from infinity.engine import EngineState
from infinity.errors import CheckpointError, CheckpointMismatch, IllegalTransition
from infinity.placement import Placement

TIERS = {"ram": ("cpu", "cpu"), "nvme": ("nvme", "nvme"), "nvme-opt": ("nvme", "cpu"), "nvme-params": ("cpu", "nvme")}
SAVED_AT, LAST = 3, 6


def on(tier: str, nvme: Path, **options: Any) -> dict[str, Any]:
    optim, params = TIERS[tier]
    return settings(nvme, optim=optim, params=params, num_micro_batches=2, **options)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [(tier, tier) for tier in TIERS]
    + [("ram", "nvme"), ("nvme", "ram"), ("nvme-opt", "nvme-params"), ("nvme-params", "nvme-opt")],
)
def test_resume_on_any_tier_is_bit_exact(saved_on: str, loaded_on: str, nvme: Path, tmp_path: Path) -> None:
    """C104, C125: saved at step 3 on one tier, loaded on another with other tiles: the next steps are the same.

    The bias correction is large at step 3, so a lost step count would show; dropout, so would a lost position of the masks.
    """
    expected = train(DROPOUT_GPT, on("ram", nvme), num_steps=LAST)
    config = on(saved_on, nvme)
    with open_engine(DROPOUT_GPT.build(), config) as engine:
        before = take(engine, DROPOUT_GPT, config, range(SAVED_AT))
        path = engine.save_checkpoint(tmp_path / "checkpoints", client_state={"position": 17})
        onwards = take(engine, DROPOUT_GPT, config, range(SAVED_AT, LAST))
    onwards.losses = before.losses + onwards.losses
    require_same(onwards, expected)  # saving itself changed nothing
    config = on(loaded_on, nvme, tile_bytes="5KiB")
    with open_engine(DROPOUT_GPT.build(seed=9), config) as engine:
        assert engine.load_checkpoint(path) == (path, {"position": 17})
        assert engine.global_steps == SAVED_AT
        after = take(engine, DROPOUT_GPT, config, range(SAVED_AT, LAST))
    after.losses = before.losses + after.losses
    require_same(after, expected)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["odd-mlp", "tiny-gpt", "lora-gpt", "branchy", "bulk"])
def test_every_kit_model_resumes(name: str, bf16: bool, nvme: Path, tmp_path: Path) -> None:
    """C104: tied, frozen and unused parameters, odd sizes: save, load and go on, everything on NVMe."""
    kit = kit_of(name)
    config = on("nvme", nvme, bf16=bf16)
    expected = train(kit, config, num_steps=4)
    with open_engine(kit.build(), config) as engine:
        first = take(engine, kit, config, range(2))
        engine.save_checkpoint(tmp_path / "checkpoints")
    with open_engine(kit.build(seed=5), config) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        run = take(engine, kit, config, range(2, 4))
        run.state = engine.state_dict()
    run.losses = first.losses + run.losses
    require_same(run, expected)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_resume_into_mixed_shares_and_back_in_the_same_engine(schedule: str, nvme: Path, tmp_path: Path) -> None:
    """Loaded into an engine that has trained something else: its pending updates and slots leave no trace."""
    expected = train(TINY_GPT, on("ram", nvme), num_steps=LAST)
    config = on("nvme", nvme, schedule=schedule, weight_slots=2)
    with open_engine(TINY_GPT.build(), on("nvme", nvme)) as engine:
        first = take(engine, TINY_GPT, config, range(SAVED_AT))
        engine.save_checkpoint(tmp_path / "checkpoints")
    placement = Placement.from_config(Config.from_any(config)).override("blocks.*", optim={"cpu": 0.5, "nvme": 0.5})
    with open_engine(TINY_GPT.build(seed=4), config, placement=placement) as engine:
        for _ in range(2):
            for step in (40, 41):
                engine.train_batch(TINY_GPT.batches(step, 2, torch.bfloat16))
            engine.load_checkpoint(tmp_path / "checkpoints")
            run = take(engine, TINY_GPT, config, range(SAVED_AT, LAST))
            run.losses = first.losses + run.losses
            require_same(run, expected)


def test_schedule_and_counts_resume(nvme: Path, tmp_path: Path) -> None:
    """The learning rate goes on from the applied steps; counters and each parameter's own step count come back."""
    scheduler = {"type": "linear", "params": {"warmup_num_steps": 2, "total_num_steps": 10}}
    config = on("nvme", nvme, scheduler=scheduler)
    with open_engine(BRANCHY.build(), config) as engine:
        take(engine, BRANCHY, config, range(3))
        engine.save_checkpoint(tmp_path / "checkpoints")
        lr, steps = engine.lr, dict(engine.optimizer.steps)
    with open_engine(BRANCHY.build(), config) as engine:
        assert engine.lr == 0.0
        engine.load_checkpoint(tmp_path / "checkpoints")
        assert engine.lr == lr
        assert dict(engine.optimizer.steps) == steps
        assert steps["branches.0.weight"] == 2
        assert steps["branches.1.weight"] == 1
        assert "branches.2.weight" not in steps


def test_newest_of_several_is_loaded_and_old_ones_go(nvme: Path, tmp_path: Path) -> None:
    """With keep=2 the newest two remain; the directory of all stands for the newest."""
    config = on("ram", nvme)
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(4):
            engine.train_batch(TINY_GPT.batches(step, 2, torch.bfloat16))
            engine.save_checkpoint(tmp_path / "checkpoints", keep=2)
    assert len([path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]) == 2
    with open_engine(TINY_GPT.build(), config) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        assert engine.global_steps == 4


@pytest.mark.parametrize("wrong", ["another model", "another precision"])
def test_foreign_checkpoints_are_refused_and_change_nothing(wrong: str, nvme: Path, tmp_path: Path) -> None:
    """A checkpoint of another model or precision is refused; the engine's state is as before and it goes on."""
    config = on("nvme", nvme)
    other: Kit = LORA_GPT if wrong == "another model" else TINY_GPT
    with open_engine(other.build(), on("nvme", nvme, bf16=wrong == "another model")) as engine:
        engine.save_checkpoint(tmp_path / "checkpoints")
    expected = train(TINY_GPT, config, num_steps=3)
    with open_engine(TINY_GPT.build(), config) as engine:
        first = take(engine, TINY_GPT, config, range(1))
        with pytest.raises(CheckpointMismatch):
            engine.load_checkpoint(tmp_path / "checkpoints")
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path / "nothing here")
        assert engine.state is EngineState.READY
        run = take(engine, TINY_GPT, config, range(1, 3))
    run.losses = first.losses + run.losses
    require_same(run, expected)


@pytest.mark.parametrize("place", ["ram", "nvme"])
def test_a_load_that_ends_half_way_leaves_no_engine_to_train_with(
    place: str, nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that turns out damaged after other units were replaced: nobody trains on with a mixture of two states."""
    config = on(place, nvme)
    with open_engine(TINY_GPT.build(), config) as engine:
        take(engine, TINY_GPT, config, range(1))
        path = engine.save_checkpoint(tmp_path / "checkpoints")
        read, reads = Checkpoint.read, iter(range(1000))

        def damaged_later(self: Checkpoint, *arguments: Any) -> None:
            if next(reads) == 20:
                raise CheckpointError("A unit is damaged.")
            read(self, *arguments)

        monkeypatch.setattr(Checkpoint, "read", damaged_later)
        with pytest.raises(CheckpointError, match="damaged"):
            engine.load_checkpoint(path)
        assert engine.state is EngineState.FAILED
        with pytest.raises(IllegalTransition, match="FAILED"):
            engine.train_batch(TINY_GPT.batches(1, 1, torch.bfloat16))


def test_buffers_are_saved_and_restored(nvme: Path, tmp_path: Path) -> None:
    """Running statistics of a BatchNorm inside an absent unit come back with the checkpoint."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1))

    config = settings(nvme, optim="nvme", params="nvme", bf16=False)

    def loss_of(output: torch.Tensor, micro_batch: Any) -> torch.Tensor:
        return output.square().mean()

    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    with open_engine(make(), config) as engine:
        for _ in range(2):
            engine.train_batch([x], loss_fn=loss_of)
        engine.save_checkpoint(tmp_path / "checkpoints")
        expected = [engine.train_batch([x], loss_fn=loss_of).loss, engine.train_batch([x], loss_fn=loss_of).loss]
        state = engine.state_dict()
    with open_engine(make(), config) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        assert int(engine.module.get_buffer("1.num_batches_tracked")) == 2
        assert [engine.train_batch([x], loss_fn=loss_of).loss, engine.train_batch([x], loss_fn=loss_of).loss] == expected
        resumed = engine.state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in state.items())


def test_where_no_copy_fits_the_swap_files_are_the_checkpoint(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for a copy, the run's own files are committed in place and outlive the engine; training goes on."""
    import infinity.engine.persistence as persistence
    from infinity.errors import SwapSpaceError

    config = on("nvme", nvme)
    expected = train(TINY_GPT, config, num_steps=LAST)

    def no_room(*_: object, **__: object) -> Path:
        raise SwapSpaceError("no room for a copy")

    with open_engine(TINY_GPT.build(), config) as engine:
        first = take(engine, TINY_GPT, config, range(SAVED_AT))
        with monkeypatch.context() as patched:
            patched.setattr(persistence, "write_checkpoint", no_room)
            path = engine.save_checkpoint(tmp_path / "checkpoints")
    with open_engine(TINY_GPT.build(seed=3), config, adopt=path) as engine:
        engine.load_checkpoint(path)
        assert engine.global_steps == SAVED_AT
        run = take(engine, TINY_GPT, config, range(SAVED_AT, LAST))
    run.losses = first.losses + run.losses
    require_same(run, expected)
    assert compute_dtype(config) is torch.bfloat16
