"""Result files that cannot be written: said before anything is measured, and no half of one stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from bench_fakes import files_below
from typer.testing import CliRunner

from infinity.cli.bench_outputs import require_writable, writing
from infinity.cli.main import app
from infinity.errors import StorageError

QUICK = ["--size", "64MiB", "--block-size", "1MiB", "--queue-depth", "2", "--seconds", "0.05", "--long-run", "0"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a directory in which no file can be made, as on a file system that is mounted read-only."""
    path = tmp_path / "read-only"
    path.mkdir()

    def temporary_file(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("infinity.cli.bench_outputs.tempfile.TemporaryFile", temporary_file)
    return path


@pytest.mark.parametrize("command", [["bench", "nvme", "--nvme", "{disk}", *QUICK], ["bench", "adam"]])
def test_an_unwritable_json_ends_a_benchmark_before_it_begins(command: list[str], refused: Path, tmp_path: Path) -> None:
    """`--json` on a read-only file system: exit code 5 at once, the file and the reason are named, nothing is left."""
    disk = tmp_path / "disk"
    arguments = [part.format(disk=disk) for part in command]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(refused / "out.json")], env={"COLUMNS": "300"})
    assert answer.exit_code == StorageError.exit_code, answer.output
    assert f"--json: {refused / 'out.json'} cannot be written: Read-only file system." in answer.output
    assert not disk.exists()
    assert not files_below(refused)


def test_a_search_whose_configuration_cannot_be_written_does_not_begin(
    refused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--tune` in a working directory on a read-only file system: said before half a minute is spent."""
    monkeypatch.chdir(refused)
    answer = CliRunner().invoke(app, ["bench", "nvme", "--nvme", str(tmp_path / "disk"), "--tune"], env={"COLUMNS": "300"})
    assert answer.exit_code == StorageError.exit_code, answer.output
    assert "--tune: infinity-nvme.json cannot be written" in answer.output
    assert not (tmp_path / "disk").exists()


def test_half_a_file_does_not_stay(tmp_path: Path) -> None:
    """A disk that fills up while a result is written: the new file is removed, one that was there before is not."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("before")
    for path in (old, new):
        require_writable("--json", path)
        with pytest.raises(StorageError, match="No space left") as caught:
            _write_half(path)
        assert caught.value.errno == errno.ENOSPC
    assert old.exists()
    assert not new.exists()
    assert files_below(tmp_path) == [old]


def _write_half(path: Path) -> None:
    with writing("--json", path), path.open("a") as file:
        file.write("half")
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--nvme ""` (an unset shell variable) is not the working directory, and too long a name is no bug of infinity's."""
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["bench", "nvme", "--nvme", name, *QUICK], env={"COLUMNS": "900"})
    assert answer.exit_code == (StorageError.exit_code if name else 2), answer.output
    assert ("File name too long" if name else "is not a path") in answer.output
    assert not files_below(tmp_path)
