"""Which checkpoint a path means, and one clear sentence for each thing that is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_fakes import fake_buffers, fake_state, fake_units, names_in, require_content

from infinity.checkpoint.completeness import latest
from infinity.checkpoint.reader import open_checkpoint
from infinity.checkpoint.writer import write_checkpoint
from infinity.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch, InfinityError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        write_checkpoint(tmp_path / "run", fake_units(step), fake_state(step), buffers=fake_buffers(step))
    return tmp_path / "run"


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def truncated(path: Path) -> None:
    os.truncate(path / "units/00001.safetensors", 900)


def missing(path: Path) -> None:
    (path / "units/00000.safetensors").unlink()


def swapped(path: Path) -> None:
    os.rename(path / "units/00000.safetensors", path / "units/00001.safetensors")
    (path / "units/00000.safetensors").write_bytes((path / "units/00001.safetensors").read_bytes())


def broken_json(path: Path) -> None:
    os.truncate(path / "manifest.json", 100)


def deep_json(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def foreign_json(path: Path) -> None:
    (path / "manifest.json").write_text('{"name": "an extension"}')


def extra_key(path: Path) -> None:
    edit_manifest(path, surprise=1)


def wrong_type(path: Path) -> None:
    edit_manifest(path, created=5)


DAMAGES = [
    (no_manifest, CheckpointIncomplete, r"step-00000002 has no manifest\.json: the save did not end"),
    (truncated, CheckpointIncomplete, r"00001\.safetensors is truncated: expected \d+ bytes, found 900"),
    (missing, CheckpointIncomplete, r"00000\.safetensors is missing"),
    (swapped, CheckpointError, r"00001\.safetensors is not the file that .*manifest\.json names: expected \d+ bytes"),
    (broken_json, CheckpointError, r"manifest\.json is not JSON"),
    (deep_json, CheckpointError, r"manifest\.json is not JSON"),
    (foreign_json, CheckpointError, r"manifest\.json is not the manifest of an infinity checkpoint"),
    (extra_key, CheckpointError, r"manifest\.json is damaged: key surprise"),
    (wrong_type, CheckpointError, r"manifest\.json is damaged: key created"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "kind", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_passed_over(
    run: Path, damage: Callable[[Path], None], kind: type[CheckpointError], message: str
) -> None:
    """Opened by name it is an error that says what is wrong; `latest` takes the one before and says why (C121)."""
    damage(run / "step-00000002")
    with pytest.raises(kind, match=message):
        open_checkpoint(run / "step-00000002")
    found = latest(run)
    assert found.found is not None
    assert found.found.path == run / "step-00000001"
    assert len(found.passed_over) == 1
    assert found.passed_over[0].startswith("step-00000002 was passed over: ")
    with open_checkpoint(run) as checkpoint:
        assert checkpoint.passed_over == found.passed_over
        require_content(checkpoint)


def test_another_format_version_is_never_passed_over(run: Path) -> None:
    """A newer program's checkpoint is a mismatch with both versions, not a reason to go on from an older step (C4)."""
    edit_manifest(run / "step-00000002", format_version=2, infinity_version="9.0")
    for path in (run, run / "step-00000002"):
        with pytest.raises(CheckpointMismatch, match=r"has format version 2, written by infinity 9\.0; .* reads version 1"):
            open_checkpoint(path)


def test_a_directory_without_any_complete_checkpoint_lists_why(run: Path) -> None:
    """Where every save was cut off, each is named."""
    for step in (1, 2):
        no_manifest(run / f"step-0000000{step}")
    with pytest.raises(CheckpointIncomplete, match=r"no complete checkpoint: step-00000002 was .* step-00000001 was"):
        open_checkpoint(run)
    assert latest(run).found is None


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    """An absent or empty directory is no error for `latest`: a run that starts afresh asks it."""
    assert latest(tmp_path / "absent").found is None
    assert latest(tmp_path).found is None


def test_paths_that_are_no_checkpoint_get_one_sentence_and_a_remedy(tmp_path: Path) -> None:
    """Absent, a file, empty, foreign: each is said, and what would be right."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").write_text("x")
    for name, message in (
        ("absent", "does not exist"),
        ("file", "is a file"),
        ("empty", "holds no"),
        ("foreign", "holds no"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(tmp_path / name)
        assert "step-..." in caught.value.remedy
        assert str(tmp_path / name) in caught.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_a_typed_error(run: Path) -> None:
    """Permission denied names the path."""
    run.chmod(0)
    try:
        with pytest.raises(InfinityError, match="Permission denied"):
            open_checkpoint(run)
    finally:
        run.chmod(0o755)


def test_leftovers_of_dead_processes_go_with_the_next_save(run: Path) -> None:
    """Partial directories of processes that are gone are removed, those of running ones and other files stay."""
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    for name in (
        f"step-00000007.partial-{dead}",
        f"step-00000007.partial-{dead}-replaced",
        "step-00000007.partial-1",
        "notes",
    ):
        (run / name / "units").mkdir(parents=True)
    write_checkpoint(run, fake_units(3), fake_state(3), keep=1)
    assert names_in(run) == ["notes", "step-00000003", "step-00000007.partial-1"]
