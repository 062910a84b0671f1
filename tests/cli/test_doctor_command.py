"""What `infinity doctor` prints, and the code that it ends with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.doctor.verdict import Finding, fails, missing, note, ok

FINE = Finding("python", "", ok("3.11.7", needed="Python 3.11 or newer"))
NOTED = Finding("io engine", "/mnt/ssd", note("threads: [denied]", needed="io_uring", remedy="docker run [--x]"))
TORCH = Finding("torch", "", missing("torch is not installed", needed="a torch", remedy="pip install torch"))
ABSENT = Finding("directory", "/mnt/ssd", fails("it is a file", needed="a directory", remedy="Give one.", exit_code=5))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the checks find; the test fills it."""
    findings: list[Finding] = []

    def examine(_: object, directories: list[Path]) -> Iterator[Finding]:
        assert directories == [Path("/mnt/ssd")]
        return iter(findings)

    monkeypatch.setattr("infinity.doctor.examine.examine", examine)
    return findings


def test_notes_do_not_fail(found: list[Finding]) -> None:
    """One line a check; what is needed and what to do stand below what is not as it should be; exit code 0."""
    found += [FINE, NOTED]
    answer = CliRunner().invoke(app, ["doctor", "--nvme", "/mnt/ssd"])
    assert answer.exit_code == 0
    assert answer.stdout.splitlines() == [
        "ok       python           3.11.7",
        "",
        "/mnt/ssd",
        "note     io engine        threads: [denied]",
        "                          needed: io_uring",
        "                          docker run [--x]",
        "",
        "Training can run.",
    ]


def test_the_first_obstacle_decides_and_all_are_named(found: list[Finding]) -> None:
    """Exit code of the first; the last line names every obstacle."""
    found += [FINE, ABSENT, TORCH]
    answer = CliRunner().invoke(app, ["doctor", "--nvme", "/mnt/ssd"])
    assert answer.exit_code == 5
    assert answer.stdout.endswith("\n\nTraining cannot run: directory /mnt/ssd, torch.\n")


def test_json_is_all_that_is_printed(found: list[Finding]) -> None:
    """`--json` prints one object and ends with the same code."""
    found += [FINE, TORCH]
    answer = CliRunner().invoke(app, ["doctor", "--json", "--nvme", "/mnt/ssd"])
    report = json.loads(answer.stdout)
    assert (answer.exit_code, report["exit_code"], report["can_train"]) == (4, 4, False)
    assert report["checks"][1] == {
        "name": "torch", "subject": "", "state": "missing", "found": "torch is not installed", "needed": "a torch",
        "remedy": "pip install torch", "exit_code": 4,
    }  # fmt: skip


def test_an_empty_path_is_refused() -> None:
    """What an unset shell variable gives is no directory, and not the working directory."""
    answer = CliRunner().invoke(app, ["doctor", "--nvme", ""])
    assert answer.exit_code == 2
    assert "is not a path" in answer.output


def test_a_directory_is_checked_once(found: list[Finding]) -> None:
    """A path that is given twice is checked once, as a run would use it."""
    found += [FINE]
    assert CliRunner().invoke(app, ["doctor", "--nvme", "/mnt/ssd", "--nvme", "/mnt/ssd"]).exit_code == 0


def test_two_names_of_one_directory_are_refused(tmp_path: Path) -> None:
    """What `infinity train` refuses is not said to be fit for training: exit code 2, both names."""
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    link.symlink_to(disk)
    answer = CliRunner().invoke(app, ["doctor", "--nvme", str(disk), "--nvme", str(link)], env={"COLUMNS": "900"})
    assert answer.exit_code == 2
    assert f"{disk} and {link} are one and the same" in answer.output
