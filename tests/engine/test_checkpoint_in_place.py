"""A checkpoint in place is gone with the next update; the copies before it are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from kit import OddMlp

import infinity
from infinity.checkpoint.completeness import latest
from infinity.engine import Engine


def open_odd(directory: Path) -> Engine:
    torch.manual_seed(0)
    device = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": device, "offload_param": device},
    }
    return infinity.initialize(model=OddMlp().bfloat16(), config=config).engine


def step(engine: Engine, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(2, width, generator=generator).bfloat16() for width in (512, 7))
    return engine.train_batch([(x, y)]).loss


def leave_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the checkpoint's writer see that much free space."""
    real = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=num_bytes))


def test_a_copy_does_not_go_for_a_checkpoint_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one checkpoint to keep, a copy survives one in place: once training goes on, the copy is the newest again."""
    saved = tmp_path / "checkpoints"
    with open_odd(tmp_path / "nvme") as engine:
        step(engine, 1)
        copy = engine.save_checkpoint(saved, keep=1)
        step(engine, 2)
        leave_free(monkeypatch, 100_000)
        in_place = engine.save_checkpoint(saved, keep=1)
        found = latest(saved).found
        assert found is not None
        assert (found.path, len(found.manifest.swap_files) > 0) == (in_place, True)
        step(engine, 3)
        engine.synchronize()
        found = latest(saved).found
        assert found is not None
        assert found.path == copy
