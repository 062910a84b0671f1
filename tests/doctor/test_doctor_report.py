"""Checks are made apart from each other, trials survive whatever happens in them, and the report keeps its form."""

from __future__ import annotations

import json
from pathlib import Path

import machine_samples as samples
import pytest

import infinity.errors
from infinity.doctor.examine import MACHINE_CHECKS, PLACE_CHECKS, examine
from infinity.doctor.trials import Refusal, Trial, run_trial
from infinity.doctor.verdict import Finding, Report, State, fails, missing, note, ok

DIRECTORIES = [Path("/mnt/a"), Path("/mnt/b")]


def states(report: Report) -> dict[tuple[str, str], State]:
    return {(finding.name, finding.subject): finding.verdict.state for finding in report.findings}


def test_a_healthy_machine(tmp_path: Path) -> None:
    """One line a check, the directories' lines for each of them, torch last; everything is fine and the code is 0."""
    report = Report(list(examine(samples.fake_machine(tmp_path), DIRECTORIES)))
    names = [(finding.name, finding.subject) for finding in report.findings]
    each = ["directory", *PLACE_CHECKS]
    expected = [(name, "") for name in MACHINE_CHECKS]
    expected += [(name, str(directory)) for directory in DIRECTORIES for name in each]
    assert names == [*expected, ("torch", ""), ("cuda", "")]
    assert set(states(report).values()) == {State.OK}
    assert (report.exit_code, report.obstacles) == (0, ())
    assert all(finding.verdict.needed and finding.verdict.found for finding in report.findings)


def test_without_a_directory_the_engine_is_tried_elsewhere(tmp_path: Path) -> None:
    """Then two lines are about the temporary directory, and one that cannot be used is no obstacle."""
    machine = samples.fake_machine(tmp_path)
    subjects = {finding.name for finding in examine(machine, []) if finding.subject}
    assert subjects == {"io engine", "registration"}
    refused = Trial(refusal=Refusal("mounted read-only", "", 5, 30))
    machine = samples.fake_machine(tmp_path / "b", trials={"infinity.doctor.try_directory": refused})
    report = Report(list(examine(machine, [])))
    [finding] = [finding for finding in report.findings if finding.subject]
    assert (finding.name, finding.verdict.state, report.exit_code) == ("io engine", State.NOTE, 0)


def test_a_check_that_goes_wrong_is_a_line(tmp_path: Path) -> None:
    """An unforeseen error in one check is that check's failure, with code 1; every other line is still there."""

    def broken(_: Path) -> int:
        raise ZeroDivisionError("a bug")

    files = {"proc/meminfo": "nothing here\n"}
    report = Report(list(examine(samples.fake_machine(tmp_path, files=files, total_bytes=broken), DIRECTORIES)))
    wrong = {finding.name: finding.verdict for finding in report.obstacles}
    assert set(wrong) == {"memory", "shared memory"}
    assert wrong["shared memory"].found == "the check itself went wrong: ZeroDivisionError: a bug"
    assert "KeyError" in wrong["memory"].found
    assert report.exit_code == 1
    assert len(report.findings) == len(MACHINE_CHECKS) + 2 * (1 + len(PLACE_CHECKS)) + 2


def test_a_trial_that_goes_wrong_is_a_line(tmp_path: Path) -> None:
    """An answer that nobody understands, about a directory or torch, leaves the other lines as they are."""
    trials = {"infinity.doctor.try_directory": Trial(answer={}), "infinity.doctor.try_torch": Trial(answer={})}
    report = Report(list(examine(samples.fake_machine(tmp_path, trials=trials), DIRECTORIES)))
    assert [(finding.name, finding.subject) for finding in report.obstacles] == [
        ("directory", "/mnt/a"), ("directory", "/mnt/b"), ("torch", ""),
    ]  # fmt: skip
    assert len(report.findings) == len(MACHINE_CHECKS) + 3


def test_the_first_obstacle_gives_the_exit_code() -> None:
    """Notes give none; the first line that keeps training from running does."""
    good = ok("x", needed="")
    hint = note("x", needed="", remedy="")
    findings = [Finding("a", "", good), Finding("b", "", hint)]
    assert Report(findings).exit_code == 0
    absent, storage = missing("x", needed="", remedy=""), fails("x", needed="", remedy="", exit_code=5)
    assert Report([*findings, Finding("c", "", storage), Finding("d", "", absent)]).exit_code == 5
    assert Report([*findings, Finding("d", "", absent), Finding("c", "", storage)]).exit_code == 4


def test_the_form_of_the_json(tmp_path: Path) -> None:
    """The keys of the report and of a check are a contract, and so are the names of the states and of the checks."""
    report = Report(list(examine(samples.fake_machine(tmp_path), [Path("/mnt/a")]))).as_json()
    report = json.loads(json.dumps(report))
    assert list(report) == ["can_train", "exit_code", "checks"]
    assert (report["can_train"], report["exit_code"]) == (True, 0)
    assert {tuple(check) for check in report["checks"]} == {
        ("name", "subject", "state", "found", "needed", "remedy", "exit_code")
    }
    assert {check["state"] for check in report["checks"]} == {"ok"}
    assert [state.value for state in State] == ["ok", "note", "missing", "fails"]
    assert [check["name"] for check in report["checks"]] == [
        "system", "python", "packages", "io module", "adam module", "checksum module", "cpu", "bf16", "cores",
        "adam kernel", "memory", "huge pages", "shared memory", "locked memory", "open files", "directory", "file system",
        "space", "direct io", "io engine", "registration", "disk", "trim", "torch", "cuda",
    ]  # fmt: skip


TRIALS = {
    "trial_that_raises": "raise RuntimeError('broken library\\nread the manual')",
    "trial_that_dies": "import os, signal\nos.kill(os.getpid(), signal.SIGILL)",
    "trial_that_leaves": "import sys\nsys.exit(3)",
    "trial_that_hangs": "import time\ntime.sleep(60)",
    "trial_that_talks": (
        "print('a banner without end', end='')\nfrom infinity.doctor.answers import ModuleAnswer\n"
        "from infinity.doctor.trials import give_answer\nimport sys\ngive_answer(lambda: ModuleAnswer(sys.argv[1]))"
    ),
    "trial_that_is_refused": (
        "from infinity.doctor.trials import give_answer\nfrom infinity.errors import StorageError\n"
        "def work():\n    raise StorageError('no room', remedy='Free some.', errno=28)\ngive_answer(work)"
    ),
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("trial_that_raises", Trial(failure="RuntimeError: broken library")),
        ("trial_that_dies", Trial(failure="ended by SIGILL")),
        ("trial_that_leaves", Trial(failure="exit code 3")),
        ("trial_that_hangs", Trial(failure="no answer in 1 seconds")),
        ("trial_that_talks", Trial(answer={"path": "hello"})),
        ("trial_that_is_refused", Trial(refusal=Refusal("no room", "Free some.", 5, 28))),
    ],
)
def test_how_trials_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, expected: Trial) -> None:
    """C21, C52: whatever a process ends with, an error, a signal, nothing at all, comes back as words or as an answer."""
    (tmp_path / f"{module}.py").write_text(TRIALS[module])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_trial(module, "hello", seconds=1 if "hangs" in module else 60) == expected


def test_a_trial_finds_what_this_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial looks for modules where this process looks, and not in its working directory."""
    (tmp_path / "infinity.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    trial = run_trial("infinity.doctor.try_import", "infinity.errors")
    assert trial.answer == {"path": infinity.errors.__file__}
