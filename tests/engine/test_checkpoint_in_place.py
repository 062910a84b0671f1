"""Where no copy fits, the swap files become the checkpoint; a new engine takes them over with the budget of the old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import BULK, open_engine, settings

import infinity.engine.persistence as persistence
from infinity.engine.in_place import adoption
from infinity.errors import CheckpointMismatch, SwapSpaceError

BUDGET_BYTES, OTHER_BUDGET_BYTES = 1800 << 10, 2000 << 10  # some tiles are resident, with the other one a few more


def settings_within(nvme: Path, budget_bytes: int | None) -> dict[str, Any]:
    config = dict(settings(nvme, num_micro_batches=2, optim="auto", params="nvme"))
    config["infinity"] = {**config["infinity"], **({"cpu_memory": budget_bytes} if budget_bytes else {})}
    if budget_bytes is None:
        config["infinity"].pop("cpu_memory", None)
    return config


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of a checkpoint fits."""

    def refuse(*_: object, **__: object) -> Path:
        raise SwapSpaceError("no room for a copy")

    monkeypatch.setattr(persistence, "write_checkpoint", refuse)


def commit(nvme: Path, directory: Path) -> tuple[Path, list[tuple[float, ...]]]:
    """Train two steps, commit in place, and return the checkpoint and the losses of two further steps without a stop."""
    with open_engine(BULK.build(), settings_within(nvme, BUDGET_BYTES)) as engine:
        expected = [engine.train_batch(BULK.batches(step, 2, torch.bfloat16)).losses for step in range(4)][2:]
    with open_engine(BULK.build(), settings_within(nvme, BUDGET_BYTES)) as engine:
        for step in range(2):
            engine.train_batch(BULK.batches(step, 2, torch.bfloat16))
        return engine.save_checkpoint(directory), expected


@pytest.mark.usefixtures("no_room")
def test_the_recorded_budget_is_used_again(nvme: Path, tmp_path: Path) -> None:
    """Without a budget of its own the new engine plans for the recorded one, and goes on bit for bit."""
    path, expected = commit(nvme, tmp_path / "checkpoints")
    found = adoption(path, num_ranks=1)
    assert found is not None
    assert found.cpu_memory_bytes == BUDGET_BYTES
    with open_engine(BULK.build(), settings_within(nvme, None), adopt=path) as engine:
        engine.load_checkpoint(path)
        assert [engine.train_batch(BULK.batches(step, 2, torch.bfloat16)).losses for step in (2, 3)] == expected


@pytest.mark.usefixtures("no_room")
def test_another_layout_is_refused_with_the_recorded_budget(nvme: Path, tmp_path: Path) -> None:
    """Another budget means other tiers: the error names the budget that would do, and the swap files stay."""
    path, _ = commit(nvme, tmp_path / "checkpoints")
    with pytest.raises(CheckpointMismatch, match=f"--cpu-memory {BUDGET_BYTES}"):
        open_engine(BULK.build(), settings_within(nvme, OTHER_BUDGET_BYTES), adopt=path)
    assert adoption(path, num_ranks=1) is not None
