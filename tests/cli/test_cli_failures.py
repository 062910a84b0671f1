"""Bad input: one clear sentence, the offending value, what would be right, and an exit code; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "unknown precision": (["--precision", "fp12"], 2, "'fp12'", "Known: bf16, fp16, fp32"),
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
    "more state than memory": (
        ["--model", "gpt-70b", "--cpu-memory", "1GiB"], 3, "gpt-70b: weights and optimizer state need 783.06 GiB", "--nvme",
    ),
    "trace in a missing directory": (["--trace", "absent/trace.json"], 5, "absent is no directory", "of your own"),
    "trace that is a directory": (["--trace", "."], 5, ". is a directory", "path of a file"),
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


def run_with(script: str, place: Path, stdout: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of Python with the package at hand."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(place)}
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command,
        cwd=place,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
        timeout=60,
        **options,
    )


COMMANDS = {
    "clean": "import sys; sys.argv[1:] = ['clean', '.']; from infinity.cli.main import main; main()",
    "help": "import sys; sys.argv[1:] = ['train', '--help']; from infinity.cli.main import main; main()",
    "doctor": "import sys; sys.argv[1:] = ['doctor']; from infinity.cli.main import main; main()",
    "display": (
        "from infinity.cli.failures import failures_explained\nfrom infinity.cli.display import open_display\n"
        "with failures_explained(), open_display() as display:\n    for _ in range(9): display.note('x' * 3000)"
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_standard_output_is_said(name: str, place: Path) -> None:
    """Output to /dev/full ends with code 5 and one sentence, not as a bug with a traceback, nor with Python's own words."""
    with open("/dev/full", "w") as full:
        done = run_with(COMMANDS[name], place, full)
    assert done.returncode == 5
    assert "Standard output cannot be written: No space left on device." in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert not list(place.glob("infinity-traceback-*"))


@pytest.mark.parametrize("name", ["clean", "doctor", "display"])
def test_a_reader_that_is_gone_ends_the_program_quietly(name: str, place: Path) -> None:
    """Output into a pipe that nobody reads (`| head`) ends as by SIGPIPE, with code 141 and without a word."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_with(COMMANDS[name], place, writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    assert not list(place.glob("infinity-traceback-*"))


def test_an_error_that_nobody_can_read_keeps_its_code(place: Path) -> None:
    """With standard error full, too, the exit code is still the error's."""
    script = (
        "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\nfrom infinity.cli.failures import failures_explained\n"
        "from infinity.errors import DataError\nwith failures_explained(): raise DataError('none', remedy='some')"
    )
    assert run_with(script, place, subprocess.DEVNULL).returncode == 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_leaves_nothing(number: signal.Signals, place: Path) -> None:
    """A signal while torch is being loaded ends the command with 128 + its number; the directory made for it is gone."""
    script = (
        "import os, sys, builtins; real = builtins.__import__\n"
        "def loading(name, *rest):\n"
        f"    if name == 'torch': os.kill(os.getpid(), {int(number)})\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = loading\n"
        "sys.argv[1:] = ['train', '--model', 'gpt-1m', '--nvme', 'new']; from infinity.cli.main import main; main()"
    )
    done = run_with(script, place, subprocess.DEVNULL)
    assert done.returncode == 128 + number
    assert done.stderr == "Stopped.\n"
    assert not (place / "new").exists()


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_while_the_command_line_is_loaded(ignored: bool, place: Path) -> None:
    """Ctrl-C during the first imports ends the process as the signal does, without a traceback; ignored, it stays so."""
    script = (
        "import os, sys, signal, builtins; real = builtins.__import__\n"
        "def loading(name, *rest):\n"
        "    if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = loading\n"
        f"signal.signal(signal.SIGINT, signal.{'SIG_IGN' if ignored else 'default_int_handler'})\n"  # whatever was inherited
        "sys.argv[1:] = ['--version']; from infinity.cli.entry import main; main()"
    )
    done = run_with(script, place, subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0 if ignored else -signal.SIGINT, "")


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
