"""What `infinity plan` prints, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app

ROOT = Path(__file__).parents[2]
ROOMY = ("--cpu-memory", "4TB", "--nvme-space", "4TB")


def asked(*options: str) -> Any:
    """The answer in JSON."""
    answer = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def row(output: str, stage: int) -> list[str]:
    """The table's cells for a stage."""
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [str(stage)])


@pytest.mark.parametrize(("parameters", "gpus", "textbook"), [
    ("7.5e9", "64", ["120.00", "31.41", "16.64", "1.88"]),
    ("7e9", "8", ["112.00", "38.50", "26.25", "14.00"]),
])  # fmt: skip
def test_the_textbook_tables_are_printed_beside_our_own(parameters: str, gpus: str, textbook: list[str]) -> None:
    """The textbook's figures as everybody knows them, and ours of 14 bytes a parameter beside them, for every stage."""
    answer = CliRunner().invoke(app, ["plan", "--parameters", parameters, "--num-gpus", gpus])
    assert answer.exit_code == 0, answer.output
    assert [row(answer.stdout, stage)[1] for stage in range(4)] == textbook
    ours = [float(row(answer.stdout, stage)[2]) for stage in range(4)]
    assert ours[0] == pytest.approx(float(parameters) * 14 / 1e9)
    assert ours[3] == pytest.approx(float(parameters) * 14 / 1e9 / int(gpus), abs=0.01)
    assert "2 + 2 + 10 = 14 in bf16; textbook 2 + 2 + 12 = 16" in answer.stdout
    assert "Give --gpu-memory SIZE for a plan." in answer.stdout


def test_the_plan_of_the_chosen_stage_follows_with_its_reason() -> None:
    """Under a memory that only the partitioned states fit the stage is named, with why, and then where everything lives."""
    answer = CliRunner().invoke(
        app, ["plan", "--model", "gpt-400m", "--num-ranks", "4", "--cpu-memory", "16GB", "--nvme-space", "1TB"]
    )
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    chosen = next(line for line in lines if line.startswith("Chosen: "))
    assert "chosen" in row(answer.stdout, int(chosen.split()[2].rstrip(".")))
    assert "it offloads least" in chosen
    assert any("cpu memory peak" in line for line in lines[lines.index(chosen) :])


def test_the_table_fits_into_80_columns() -> None:
    """Also for a large model on GPUs every figure of a stage stands whole in one line."""
    options = [
        "--model",
        "gpt-70b",
        "--num-gpus",
        "8",
        "--gpu-memory",
        "200GiB",
        "--cpu-memory",
        "2TiB",
        "--nvme-space",
        "8TB",
    ]
    answer = CliRunner().invoke(app, ["plan", *options], env={"COLUMNS": "80"})
    rows = [row(answer.stdout, stage) for stage in range(4)]
    assert rows[0][1] == "1121"
    assert sorted(len(cells) for cells in rows) == [9, 9, 9, 10]
    width = max(len(line) for line in answer.stdout.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"]))
    assert width <= 80


def test_memory_and_disk_are_shared_by_the_ranks() -> None:
    """Budgets are the machine's: each of four ranks plans with a quarter, and keeps to it."""
    found = asked("--model", "gpt-400m", "--num-ranks", "4", "--cpu-memory", "14GB", "--nvme-space", "40GB")
    for one in found["stages"]:
        assert one["plan"]["budgets"] == [["cpu", 3_500_000_000]]
        assert one["plan"]["memory_bytes"]["cpu"] <= 3_500_000_000
        assert one["plan"]["disk_bytes"] <= 10_000_000_000


def test_a_stage_that_does_not_fit_says_what_would() -> None:
    """A stage without a plan has the reason and the remedy, the others stay; where nothing fits there is no choice."""
    found = asked("--model", "gpt-400m", "--num-ranks", "4", "--cpu-memory", "18GB")
    fits = [one["fits"] for one in found["stages"]]
    assert fits == [False, True, True, True]
    refused = found["stages"][0]
    assert "16.76 GiB available, no NVMe directory given, for 4 ranks together" in refused["why_no_plan"]
    needed = re.search(r"--cpu-memory (\d+MiB) would do", refused["remedy"])
    assert needed is not None
    assert asked("--model", "gpt-400m", "--num-ranks", "4", "--cpu-memory", needed[1], "--stage", "0")["stages"][0]["fits"]
    assert found["chosen_stage"] == 1
    nothing = asked("--model", "gpt-400m", "--cpu-memory", "100MB")
    assert nothing["chosen_stage"] is None
    assert [one["fits"] for one in nothing["stages"]] == [False] * 4


def test_one_rank_takes_stage_0_and_moves_nothing_between_ranks() -> None:
    """With one rank all stages are the same: the lowest is chosen."""
    found = asked("--model", "gpt-25m", *ROOMY)
    assert found["chosen_stage"] == 0
    assert [one["links_bytes_per_step"] for one in found["stages"]] == [[]] * 4
    assert len({json.dumps(one["plan"]["memory_bytes"]) for one in found["stages"]}) == 1


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", 10), ("fp32", 8)])
def test_a_machine_with_gpus(precision: str, optimizer: int) -> None:
    """Weights on the GPUs, state in RAM, gradients on their way down; offloading is asked for as in training."""
    found = asked("--model", "gpt-1b", "--num-gpus", "2", "--gpu-memory", "80GB", "--precision", precision, *ROOMY)
    assert found["bytes_per_parameter"]["optim"] == optimizer
    links = {(line["link"], line["what"]) for line in found["stages"][1]["links_bytes_per_step"]}
    assert links == {
        ("between ranks", "weights gathered"), ("between ranks", "gradients reduced"),
        ("host to GPU", "weights"), ("GPU to host", "gradients"),
    }  # fmt: skip
    offloaded = ("--offload-params", "nvme", "--offload-optimizer", "nvme")
    away = asked("--model", "gpt-1b", "--num-gpus", "2", "--gpu-memory", "80GB", "--stage", "3", *offloaded, *ROOMY)
    assert [one["stage"] for one in away["stages"]] == [3]
    assert away["stages"][0]["plan"]["disk_bytes"] > 0
    assert found["stages"][3]["plan"]["disk_bytes"] == 0


def test_weights_are_offloaded_over_ranks_in_stage_3_alone() -> None:
    """The lower stages say why they have no plan, and stage 3 is chosen."""
    found = asked("--model", "gpt-25m", "--num-ranks", "2", "--offload-params", "nvme", *ROOMY)
    assert [one["fits"] for one in found["stages"]] == [False, False, False, True]
    assert "in stage 1 each of 2 ranks computes with all of them" in found["stages"][1]["why_no_plan"]
    assert "--stage 3" in found["stages"][1]["remedy"]
    assert found["chosen_stage"] == 3


def test_a_model_of_transformers_is_read_from_its_directory(tmp_path: Path) -> None:
    """A directory with a config.json is counted without the library; the families' arithmetic has tests of its own."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "intermediate_size": 11008, "vocab_size": 32000,
    }))  # fmt: skip
    assert asked("--model", str(tmp_path), *ROOMY)["num_parameters"] == 6_738_415_616


@pytest.mark.parametrize(("options", "named"), [
    ([], "neither is given"),
    (["--model", "gpt-1m", "--parameters", "7e9"], "both are given"),
    (["--model", "gpt-1n"], "gpt-1m"),
    (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    (["--parameters", "many"], "'many' is not a whole number"),
    (["--parameters", "7e9", "--stage", "4"], "'4' is no stage"),
    (["--parameters", "7e9", "--precision", "int3"], "'int3' is not known"),
    (["--parameters", "7e9", "--schedule", "diagonal"], "'diagonal' is not known"),
    (["--parameters", "7e9", "--num-gpus", "0"], "--num-gpus: 0 is too small"),
    (["--parameters", "7e9", "--num-ranks", "2", "--gpu-memory", "1GB"], "without GPUs"),
    (["--parameters", "7e9", "--cpu-memory", "much"], "'much' is not a size"),
    (["--parameters", "7e9", "--offload-params", "tape"], "'tape' is no tier"),
    (["--model", "gpt-1m", "--offload-params", "nvme", "--cpu-memory", "1GB"], "Give its free space: --nvme-space SIZE"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options: list[str], named: str) -> None:
    """Exit code 2 and the offending option or value."""
    answer = CliRunner().invoke(app, ["plan", *options])
    assert answer.exit_code == 2
    assert named in answer.output


def test_no_torch_is_loaded() -> None:
    """The whole command, families included, runs without torch, transformers and the native modules."""
    code = (
        "import sys; from infinity.cli.main import app; from typer.testing import CliRunner\n"
        "answer = CliRunner().invoke(app, ['plan', '--parameters', '7e9', '--num-gpus', '8', '--gpu-memory', '80GB'])\n"
        "assert answer.exit_code == 0, answer.output\n"
        "assert not {'torch', 'transformers', 'infinity._aio', 'infinity._cpu_adam'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
