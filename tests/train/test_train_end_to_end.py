"""A built-in model trained through the real engine, all of its state on disk: the same losses however it is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training_fakes import Remembering

import infinity.memory.host_allocator as host_allocator
from infinity.aio.select import Probe, probe
from infinity.config import Layer
from infinity.engine import directories
from infinity.models.presets import parameter_count, preset
from infinity.store.directory import list_runs
from infinity.telemetry.jsonl import read_jsonl
from infinity.train import preflight
from infinity.train.assemble import open_training_engine
from infinity.train.loop import train
from infinity.train.options import TrainOptions, resolve_config
from infinity.train.preflight import check_run
from infinity.train.summary import Summary

STEPS = 4
NVME = {
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_param.device": "nvme",
    "infinity.cpu_memory": "512MiB",
}


def run(place: Path, name: str, keys: dict[str, object], **changes: Any) -> tuple[Summary, Remembering]:
    """Train gpt-1m for four steps on a small text."""
    text = place / "text"
    if not text.exists():
        text.write_bytes(bytes((i * i + 7) % 251 for i in range(5000)))
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "infinity.nvme": str(place / "nvme")}
    layers = [Layer("test", {**batch, **keys})]
    options = TrainOptions(
        config=resolve_config(layers, model="gpt-1m", steps=STEPS, has_native_bf16=True), model="gpt-1m", steps=STEPS,
        seq_len=24, data=(text,), output=place / name, **changes,
    )  # fmt: skip
    reporter = Remembering()
    return train(check_run(options, reporter), reporter, open_training_engine), reporter


def losses(output: Path) -> list[object]:
    return [record["loss"] for record in read_jsonl(output / "metrics.jsonl")]


def test_every_note_of_the_engine_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not available or is done otherwise reaches the user: from the configuration, the allocator and the engine."""
    monkeypatch.setattr(host_allocator, "find_mallopt", lambda: None)
    engines = []

    def opened(checked: Any, reporter: Any) -> Any:
        engines.append(open_training_engine(checked, reporter))
        return engines[0]

    text = tmp_path / "text"
    text.write_bytes(bytes(5000))
    layers = [Layer("test", {"prescale_gradients": True, "infinity.nvme": str(tmp_path / "nvme"), **NVME})]
    config = resolve_config(layers, model="gpt-1m", steps=1, has_native_bf16=True)
    options = TrainOptions(config=config, model="gpt-1m", steps=1, seq_len=24, data=(text,), output=tmp_path / "out")
    reporter = Remembering()
    train(check_run(options, reporter), reporter, opened)
    notes = engines[0].notes
    assert any("prescale_gradients" in note for note in notes)
    assert any("no mallopt" in note for note in notes)
    assert {note: reporter.notes.count(note) for note in notes} == dict.fromkeys(notes, 1)


def test_engine_and_registration_are_said(tmp_path: Path) -> None:
    """The plan says what can be registered, a note and summary.json what is: with io_uring files and buffers."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    summary, reporter = run(tmp_path, "out", {**NVME, "infinity.engine": "uring"})
    [row] = [row.value for row in reporter.rows if row.name == "engine"]
    assert row.startswith(("uring, O_DIRECT, ", "uring, through the page cache, "))
    assert row.endswith("can register files and buffers")
    assert "Reads and writes: uring, files and buffers registered." in reporter.notes
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (written["engine"], written["registered_files"], written["registered_buffers"]) == ("uring", True, True)
    assert any(row.name == "I/O" and "registered" in row.value for row in summary.rows())


def test_a_directory_is_tried_once_and_what_was_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes over what the preflight tried; the note and summary.json name what it opened, or that it did not."""
    tried: list[Path] = []

    def counting(directory: Path, kind: str) -> Probe:
        tried.append(directory)
        return probe(directory, kind)

    monkeypatch.setattr(preflight, "probe", counting)
    monkeypatch.setattr(directories, "probe", counting)
    summary, reporter = run(tmp_path, "disk", {**NVME, "infinity.engine": "threads"})
    assert tried == [tmp_path / "nvme"]
    assert summary.engine == "threads"
    assert summary.checksums
    assert "Reads and writes: threads." in reporter.notes
    summary, reporter = run(tmp_path, "memory", {"infinity.engine": "threads"})
    assert tried == [tmp_path / "nvme"] * 2
    assert (summary.engine, summary.checksums) == ("none", False)
    assert not [note for note in reporter.notes if note.startswith("Reads and writes")]


def test_the_plan_says_how_the_update_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C51, C53, C56: instruction set, threads of how many cores, and the hyper-parameters in force."""
    monkeypatch.setenv("INFINITY_CPU_ADAM", "scalar")
    _, reporter = run(tmp_path, "out", {"infinity.adam_threads": 1, "optimizer.params.betas": (0.8, 0.95)})
    said = {row.name: row.value for row in reporter.rows}
    assert re.fullmatch(r"scalar, 1 of \d+ cores", said["adam"])
    assert re.fullmatch(r"AdamW, lr .+, betas 0\.8 0\.95, eps 1e-08, weight decay .+", said["optimizer"])


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp16"])
def test_disk_and_resume_change_no_bit(tmp_path: Path, name: str) -> None:
    """All in RAM, all on disk, and stopped after step 2 and resumed: equal losses and equal weights, bit for bit.

    In fp16 the loss scale is in the metrics: it is doubled after two steps, the second of which is the last before the stop.
    """
    precision: dict[str, object] = {"bf16.enabled": name == "bf16"}
    if name == "fp16":
        precision = {"fp16.enabled": True, "fp16.initial_scale_power": 8, "fp16.loss_scale_window": 2}
    run(tmp_path, "ram", precision, save_weights=True)
    summary, reporter = run(tmp_path, "disk", {**precision, **NVME}, checkpoint_every=2, save_weights=True)
    resume = str(tmp_path / "disk" / "checkpoints" / "step-00000002")
    resumed, _ = run(tmp_path, "resumed", {**precision, **NVME}, resume=resume, save_weights=True)
    assert resumed.steps_in_this_process == STEPS - 2
    assert losses(tmp_path / "disk") == losses(tmp_path / "ram")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "ram")[2:]
    scales = [record["loss_scale"] for record in read_jsonl(tmp_path / "disk" / "metrics.jsonl")]
    assert scales == ([256, 256, 512, 512] if name == "fp16" else [1] * STEPS)
    assert [record["loss_scale"] for record in read_jsonl(tmp_path / "resumed" / "metrics.jsonl")] == scales[2:]
    assert summary.precision == name
    expected = load_file(tmp_path / "ram" / "weights" / "model.safetensors")
    assert sum(tensor.numel() for tensor in expected.values()) == parameter_count(preset("gpt-1m"))
    for output in ("disk", "resumed"):
        found = load_file(tmp_path / output / "weights" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected)
    assert summary.nvme_write_bytes > 0
    assert any(row.name == "nvme total" for row in reporter.rows)
    assert json.loads((tmp_path / "disk" / "plan.json").read_text())["nvme_write_bytes"] > 0
    assert list_runs(tmp_path / "nvme") == ()
