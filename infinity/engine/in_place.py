"""Checkpoints in place: where there is no room for a copy, the swap files themselves become the checkpoint.

It stands until the first update after it. Taking it over needs the settings it was written with, for the swap files mean
nothing without their layout; the memory budget, which may have been chosen by itself, is recorded and used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.completeness import verify
from infinity.checkpoint.manifest import CheckpointState, FileRecord, state_from_json, state_to_json
from infinity.checkpoint.reader import Checkpoint
from infinity.checkpoint.sources import UnitSource
from infinity.checkpoint.writer import write_checkpoint
from infinity.errors import CheckpointIncomplete, CheckpointMismatch
from infinity.store.commit import read_commit
from infinity.store.shares import ShardShares
from infinity.store.store import Store

# Keys of the manifest that the store keeps with the swap files.
_STATE, _CPU_MEMORY = "state", "cpu_memory_bytes"


@dataclass(frozen=True, slots=True)
class Adoption:
    """A checkpoint in place that is to be taken over."""

    run_paths: tuple[Path, ...]  # its run directories
    file_bytes: tuple[int, ...]  # of the swap file in each
    state: CheckpointState
    cpu_memory_bytes: int  # the budget that its layout was planned for
    shares: tuple[ShardShares, ...]

    def require_shares(self, planned: Sequence[ShardShares]) -> None:
        """Raise CheckpointMismatch unless the plan puts every state where the swap files have it."""
        if tuple(planned) != self.shares:
            raise CheckpointMismatch(
                f"{self.run_paths[0]} was written with other tiers than this run plans: the swap files cannot be used.",
                remedy=f"Resume with --cpu-memory {self.cpu_memory_bytes} and the other settings that it was written with.",
            )


def commit_in_place(
    store: Store, directory: Path, state: CheckpointState, *, buffers: UnitSource, cpu_memory_bytes: int
) -> Path:
    """Commit the store's swap files and write a checkpoint that refers to them; return its path.

    No earlier checkpoint is removed: this one is gone with the next update, and a copy must not go for it.
    """
    store.commit_in_place({_STATE: state_to_json(state), _CPU_MEMORY: cpu_memory_bytes})
    swap_files = [
        FileRecord(str(file.resolve()), file.stat().st_size, None)
        for run in store.directories
        for file in sorted(run.iterdir())
        if file.suffix in (".bin", ".json") and file.name != "owner.json"
    ]
    return write_checkpoint(directory, (), state, buffers=buffers, swap_files=swap_files)


def adoption(checkpoint: Path, *, num_ranks: int) -> Adoption | None:
    """Return what taking over a checkpoint in place needs; None for one that is a copy.

    Raises CheckpointError and its kinds where the swap files are no longer that checkpoint, or where they, which one rank
    has written, would have to serve several.
    """
    manifest = verify(checkpoint).manifest
    if not manifest.swap_files:
        return None
    if num_ranks > 1:
        raise CheckpointMismatch(
            f"{checkpoint} lies in the swap files of one rank, {Path(manifest.swap_files[0].path).parent}; this job has "
            f"{num_ranks} ranks.",
            remedy="Resume it with one rank and save a copy where there is room for one; that loads on any number of ranks.",
        )
    run = Path(manifest.swap_files[0].path).parent
    commit = read_commit(run)
    cpu_memory_bytes = commit.manifest.get(_CPU_MEMORY)
    if not isinstance(cpu_memory_bytes, int):
        raise CheckpointMismatch(f"{run} was not committed by this version of infinity: it names no memory budget.")
    state = state_from_json(commit.manifest.get(_STATE), where=str(run))
    if state != manifest.state:  # names and lengths are the same; the content is another commit's
        raise CheckpointIncomplete(
            f"{checkpoint} is gone: its swap files in {run} hold the checkpoint of step {state.counters.global_step} now.",
            remedy="Resume from that one, or from one that is a copy.",
        )
    return Adoption(commit.run_paths, commit.file_bytes, state, cpu_memory_bytes, commit.shares)


def require_adopted(checkpoint: Checkpoint, adopted: CheckpointState | None) -> None:
    """Raise CheckpointMismatch unless the engine took over exactly the swap files that this checkpoint means."""
    if adopted != checkpoint.state:
        raise CheckpointMismatch(
            f"{checkpoint.path} lies in swap files that this engine did not take over.",
            remedy="Make the engine with initialize(adopt=...) naming this checkpoint, and its own settings.",
        )
