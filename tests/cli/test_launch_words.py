"""The last words of a job over ranks: the plan of a rank, read from the file that the run has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.byte_sizes import MIB
from infinity.cli.main import app
from infinity.cli.ranks import plan_lines
from infinity.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--set", "train_batch_size=7", "--set", "gradient_accumulation_steps=2"], "train_batch_size"),
        (["--steps", "0"], "--steps: 0 is too small"),
        (["--num-gpus", "3"], "contradicts --num-ranks 2"),
    ],
)
def test_what_every_rank_would_refuse_is_said_once(keys: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is started for a job that each of them would refuse."""
    monkeypatch.setattr("infinity.launch.run.run_ranks", None)
    answer = CliRunner().invoke(app, ["train", "--num-ranks", "2", *keys])
    assert answer.exit_code == ConfigError.exit_code
    assert answer.stderr.count("error: ") == 1
    assert words in answer.stderr


def test_the_plan_of_a_rank_is_shown_by_tier(tmp_path: Path) -> None:
    """Owners, peaks with their budgets, and NVMe; nothing where the run ended before there was a plan (C40)."""
    path = tmp_path / "plan.json"
    assert list(plan_lines(path)) == []
    line = {"tier": "cpu", "owner": "optimizer state", "num_bytes": 3 * MIB, "counts": "3 tiles"}
    plan = {"memory": [line], "budgets": [["cpu", 8 * MIB]], "memory_bytes": {"cpu": 3 * MIB}, "disk_bytes": MIB}
    path.write_text(json.dumps(plan))
    assert list(plan_lines(path)) == [
        f"Planned for each rank ({path}):",
        "  cpu optimizer state  3.00 MiB: 3 tiles",
        "  cpu memory peak  3.00 MiB of 8.00 MiB",
        "  nvme total  1.00 MiB",
    ]
