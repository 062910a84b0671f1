"""`auto` and what is left open: filled from the command line, the model and the batch arithmetic, each with its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.config import Config, Layer, SourcedValue, flag_layer
from infinity.errors import ConfigError, DataError
from infinity.train.options import resolve_config

AUTO_PARAMS = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
TRAINER = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": AUTO_PARAMS},
}


def resolved(*layers: Layer, steps: int = 40) -> Config:
    return resolve_config(layers, model="gpt-25m", steps=steps, has_native_bf16=True)


def test_auto_is_filled_from_flags_model_and_run() -> None:
    """A trainer's file: the flags' values first, then what the run and the model say; every source names the file's auto."""
    config = resolved(Layer("ds.json", TRAINER), flag_layer("--micro-batch-size", "train_micro_batch_size_per_gpu", 3))
    found = config.resolved(1)
    said = "chosen by infinity train (ds.json says auto)"
    assert found["optimizer.params.lr"] == SourcedValue(1e-3, said)
    assert found["optimizer.params.weight_decay"] == SourcedValue(0.1, said)
    assert found["bf16.enabled"] == SourcedValue(True, said)
    assert found["scheduler.params.total_num_steps"] == SourcedValue(40, said)
    assert found["scheduler.params.warmup_num_steps"] == SourcedValue(10, said)
    assert found["train_micro_batch_size_per_gpu"] == SourcedValue(3, "--micro-batch-size")
    assert found["gradient_accumulation_steps"] == SourcedValue(2, said)
    assert found["train_batch_size"] == SourcedValue(6, "6 = 3 x 2 x 1 ranks")
    assert found["gradient_clipping"] == SourcedValue(1.0, "default (ds.json says auto)")
    assert found["optimizer.params.eps"] == SourcedValue(1e-8, "default (ds.json says auto)")


def test_a_named_schedule_keeps_its_own_warmup() -> None:
    """DeepSpeed's types take the length of the run and nothing else; our own get the run's warm-up, too."""
    warmup = resolved(Layer("ds.json", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}))
    assert warmup.scheduler.values()["warmup_num_steps"] == 1000
    decay = resolved(Layer("ds.json", {"scheduler": {"type": "WarmupDecayLR"}}), steps=2000)
    assert (decay.scheduler.params.total_num_steps, decay.scheduler.params.warmup_num_steps) == (2000, 1000)
    assert resolved(flag_layer("--lr-schedule", "scheduler.type", "linear")).scheduler.params.warmup_num_steps == 10
    assert resolved().scheduler.type == "cosine"


def test_a_total_alone_is_divided_by_the_arithmetic() -> None:
    """With train_batch_size the rest of the triple is not chosen but computed; a contradiction shows the product."""
    config = resolved(Layer("ds.json", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}))
    assert config.resolved(1)["train_micro_batch_size_per_gpu"] == SourcedValue(8, "8 = 8 x 1 x 1 ranks")
    wrong = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=r"2 x 4 x 1 = 8"):
        resolved(Layer("ds.json", wrong)).resolved(1)


def test_print_config_shows_every_key_with_its_source_and_trains_nothing(tmp_path: Path) -> None:
    """C138: one line a key with value and source, a line for what has no effect, and no directory is made."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**TRAINER, "tensorboard": {"enabled": True}}))
    output = tmp_path / "out"
    arguments = ["train", "--config", str(path), "--lr", "0.25", "--print-config", "--output", str(output)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in answer.stdout.splitlines()}
    assert lines["optimizer.params.lr"] == "0.25  (--lr)"
    assert lines["scheduler.params.total_num_steps"] == f"300  (chosen by infinity train ({path} says auto))"
    assert lines["zero_optimization.stage"] == "left to the program  (default)"
    assert lines["tensorboard:"].startswith("has no effect")
    assert not output.exists()


@pytest.mark.parametrize(
    ("more", "exit_code", "words"),
    [
        (("--micro-batches", "5"), ConfigError.exit_code, "1 x 5 x 3 = 15"),
        (("--seq-len", "100000000"), DataError.exit_code, "needed 100000001"),
    ],
)
def test_what_every_rank_would_say_is_said_before_any_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], exit_code: int, words: str
) -> None:
    """--num-ranks: the batch arithmetic of all ranks, and the data, are errors of the launcher, said once."""
    started: list[object] = []
    monkeypatch.setattr("infinity.launch.run.run_ranks", lambda *arguments: started.append(arguments))
    batch = ("--set", "train_batch_size=6", "--micro-batch-size", "1", "--output", str(tmp_path / "out"))
    answer = CliRunner().invoke(app, ["train", "--num-ranks", "3", *batch, *more])
    assert answer.exit_code == exit_code
    assert answer.output.replace("\n", " ").count(words) == 1
    assert started == []


def test_the_configuration_of_a_job_is_that_of_its_ranks() -> None:
    """--print-config with --num-ranks: the triple for so many."""
    answer = CliRunner().invoke(
        app, ["train", "--num-ranks", "3", "--set", "train_batch_size=12", "--micro-batch-size", "2", "--print-config"]
    )
    [line] = [line for line in answer.stdout.splitlines() if line.startswith("gradient_accumulation_steps")]
    assert line.split(maxsplit=1)[1] == "2  (12 = 2 x 2 x 3 ranks)"
