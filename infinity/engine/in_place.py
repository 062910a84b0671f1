"""Checkpoints in place: where there is no room for a copy, the swap files themselves become the checkpoint.

It stands until the first update after it. Taking it over needs the settings it was written with, for the swap files mean
nothing without their layout.
"""

from __future__ import annotations

from pathlib import Path

from infinity.checkpoint.completeness import verify
from infinity.checkpoint.manifest import CheckpointState, FileRecord, state_from_json, state_to_json
from infinity.checkpoint.reader import Checkpoint
from infinity.checkpoint.sources import UnitSource
from infinity.checkpoint.writer import write_checkpoint
from infinity.errors import CheckpointMismatch
from infinity.store.commit import read_commit
from infinity.store.store import Store


def commit_in_place(store: Store, directory: Path, state: CheckpointState, *, buffers: UnitSource) -> Path:
    """Commit the store's swap files and write a checkpoint that refers to them; return its path.

    No earlier checkpoint is removed: this one is gone with the next update, and a copy must not go for it.
    """
    store.commit_in_place(state_to_json(state))
    swap_files = [
        FileRecord(str(file.resolve()), file.stat().st_size, None)
        for run in store.directories
        for file in sorted(run.iterdir())
        if file.suffix in (".bin", ".json") and file.name != "owner.json"
    ]
    return write_checkpoint(directory, (), state, buffers=buffers, swap_files=swap_files)


def committed_run(checkpoint: Path) -> Path | None:
    """Return the run directory whose swap files a checkpoint refers to; None for one that is a copy."""
    files = verify(checkpoint).manifest.swap_files
    return Path(files[0].path).parent if files else None


def committed_state(run: Path) -> CheckpointState:
    """Return the state that a run directory was committed with. Raises CheckpointError and its kinds."""
    return state_from_json(dict(read_commit(run).manifest), where=str(run))


def require_adopted(checkpoint: Checkpoint, adopted: CheckpointState | None) -> None:
    """Raise CheckpointMismatch unless the engine took over exactly the swap files that this checkpoint means."""
    if adopted != checkpoint.state:
        raise CheckpointMismatch(
            f"{checkpoint.path} lies in swap files that this engine did not take over.",
            remedy="Make the engine with initialize(adopt=...) naming this checkpoint, and its own settings.",
        )
