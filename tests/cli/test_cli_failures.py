"""Bad input: one clear sentence, the offending value, what would be right, and an exit code; nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Answer:
    """What the command said."""

    code: int
    out: str
    err: str


def infinity(*arguments: object, cwd: Path) -> Answer:
    """Run the command in `cwd` as a user would."""
    done = subprocess.run(
        [sys.executable, "-m", "infinity", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, check=False,
    )  # fmt: skip
    return Answer(done.returncode, done.stdout, done.stderr)


BAD_INPUT = {
    "unknown preset": (["--model", "gpt-26m"], 2, "'gpt-26m' is no preset", "Did you mean gpt-25m?"),
    "unknown key": (["--set", "optimizer.params.lrr=1"], 2, "optimizer.params.lrr", "did you mean"),
    "set without value": (["--set", "seed"], 2, "--set seed", "--set optimizer.params.lr=3e-4"),
    "no size": (["--cpu-memory", "2XB"], 2, "'2XB'", "2GiB"),
    "unknown tier": (["--offload-params", "disk"], 2, "'disk'", "nvme"),
    "unknown schedule": (["--lr-schedule", "step"], 2, "'step'", "cosine"),
    "unknown precision": (["--precision", "fp16"], 2, "'fp16'", "Known: bf16, fp32"),
    "no whole number": (["--steps", "many"], 2, "'many' is not a whole number", "--steps"),
    "no whole number of steps between checkpoints": (["--checkpoint-every", "x"], 2, "'x' is not a whole number", ""),
    "empty output": (["--output", ""], 2, "'' is not a path", "--output"),
    "empty data": (["--data", ""], 2, "'' is not a path", "--data"),
    "empty resume": (["--resume", ""], 2, "--resume: '' is", "auto"),
    "no number": (["--lr", "fast"], 2, "'fast' is not a number", "--lr"),
    "unknown option": (["--nvm", "x"], 2, "--nvm", "--nvme"),
    "no steps": (["--steps", "0"], 2, "--steps: 0", "at least 1"),
    "nothing left to train on": (["--hold-out", "1"], 2, "--hold-out: 1.0", "below 1"),
    "offload without directory": (["--offload-optimizer", "nvme"], 2, "no directory is given", "--nvme"),
    "config that is missing": (["--config", "absent.json"], 2, "absent.json", "JSON file"),
    "config that is broken": (["--config", "broken.json"], 2, "broken.json, line 1", "not JSON"),
    "config with an unknown key": (["--config", "wrong.json"], 2, "zero_optimisation", "zero_optimization"),
    "data that is missing": (["--data", "absent"], 10, "absent does not exist", "Give a file"),
    "data that is empty": (["--data", "empty"], 10, "--data empty: found 0 bytes in 0 files, needed 257", "--seq-len"),
    "data that is short": (["--data", "short"], 10, "found 100 bytes in 1 files, needed 257", "--seq-len"),
    "evaluation data that is short": (["--eval-data", "short"], 10, "--eval-data short: found 100 bytes", "--seq-len"),
    "character device": (["--nvme", "/dev/null"], 5, "/dev/null is a character device", "mount point"),
    "file as directory": (["--nvme", "short"], 5, "short is a file", "Give a directory"),
    "missing parent": (["--nvme", "absent/scratch"], 5, "absent", "mkdir -p"),
    "output that is a file": (["--output", "short/run"], 5, "short is not a directory", "Give a directory"),
    "checkpoint that is missing": (["--resume", "absent"], 7, "absent is absent", "step-"),
    "checkpoint that is a file": (["--resume", "short"], 7, "short is a file", "step-"),
    "checkpoint that is foreign": (["--resume", "step-00000001"], 7, "step-00000001", ""),
    "more state than disk": (
        ["--model", "gpt-70b", "--offload-optimizer", "nvme", "--offload-params", "nvme", "--nvme", "new"],
        5, "783.06 GiB", "smaller --model",
    ),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with the files that the cases name."""
    (tmp_path / "short").write_bytes(b"x" * 100)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "wrong.json").write_text(json.dumps({"zero_optimisation": {"stage": 3}}))
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text(json.dumps({"format": "another"}))
    return tmp_path


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_explained_and_leaves_nothing(case: str, place: Path) -> None:
    """The code, the offending value and the remedy are right; no traceback; no file was made or changed (C7, C31)."""
    arguments, code, offending, remedy = BAD_INPUT[case]
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    answer = infinity("train", *arguments, cwd=place)
    said = " ".join(answer.err.replace("│", " ").split())
    assert answer.code == code, answer
    assert "error" in said.lower()
    assert offending in said
    assert remedy in said
    assert "Traceback" not in said
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert not (place / "new").exists()
    assert not (place / "runs").exists()


def test_a_block_device_names_its_mount_point(place: Path) -> None:
    """A block device is refused with the directory at which it is mounted, where there is one (C7)."""
    device = next((path for path in sorted(Path("/dev").glob("*")) if path.is_block_device()), None)
    if device is None:
        pytest.skip("no block device is visible")
    answer = infinity("train", "--nvme", device, cwd=place)
    assert answer.code == 5
    assert f"{device} is a block device" in answer.err
    assert "mount" in answer.err


def test_an_unexpected_error_keeps_its_traceback_in_a_file(place: Path) -> None:
    """What nobody foresaw is one line on the screen, with the file that holds the traceback."""
    script = (
        "from infinity.cli.failures import failures_explained\nwith failures_explained(): raise RuntimeError('odd [thing]')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(place)})  # fmt: skip
    assert done.returncode == 1
    assert "error: RuntimeError: odd [thing]" in done.stderr
    kept = next(place.glob("infinity-traceback-*.txt"))
    assert str(kept) in done.stderr
    assert "Traceback" in kept.read_text()
    assert "Traceback (" not in done.stderr
