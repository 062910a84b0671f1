"""Checkpoints by tag, as ZeRO's users name them: `<directory>/<tag>/step-<n>`, and a file `latest` with the last tag."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from infinity.checkpoint.failures import storage_errors
from infinity.errors import CheckpointError

LATEST = "latest"


class LoadedCheckpoint(NamedTuple):
    """What `load_checkpoint` has loaded."""

    path: Path
    client_state: dict[str, object]


def directory_of(directory: Path, tag: str | None) -> Path:
    """Return where checkpoints of this tag go. Raises CheckpointError for a tag that is no plain name."""
    if tag is None:
        return directory
    if not tag or Path(tag).name != tag or tag in (LATEST, ".."):
        raise CheckpointError(f"Checkpoint tag {tag!r} is no name of a directory.", remedy="Give a plain name.")
    return directory / tag


def note_latest(directory: Path, tag: str | None) -> None:
    """Let `latest` name this tag; without a tag it goes: the newest step is in the directory itself. Raises StorageError."""
    file = directory / LATEST
    with storage_errors("Writing", file):
        if tag is None:
            file.unlink(missing_ok=True)
            return
        beside = file.with_name(f"{LATEST}.new")
        beside.write_text(tag)
        beside.replace(file)


def find(path: Path, tag: str | None) -> Path:
    """Return the directory to load from: of the tag, else of the one that `latest` names, else `path` itself."""
    file = path / LATEST
    with storage_errors("Reading", file):
        if tag is None and file.is_file():
            tag = file.read_text().strip()
    return directory_of(path, tag)
