"""The run directories and swap files of one store, and whether they are a checkpoint at this moment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Enum
from pathlib import Path

from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import free_bytes, memory_filesystem
from infinity.errors import ConfigError, StorageError
from infinity.memory.ledger import Ledger
from infinity.states import Lifecycle, Tier
from infinity.store.checks import check_directory, require_distinct
from infinity.store.commit import Commit, consume_commit, find_resident, read_commit, write_commit
from infinity.store.directory import (
    RESIDENT_NAME,
    SWAP_NAME,
    Removed,
    RunDirectory,
    adopt_run,
    claim_run,
    remove_dead_runs,
)
from infinity.store.swap_file import create_swap_file, require_space


class CommitState(Enum):
    """SCRATCH: the files are worth nothing without this process. STANDING: they are a checkpoint."""

    SCRATCH = "scratch"
    STANDING = "standing"


COMMIT_MOVES = {CommitState.SCRATCH: (CommitState.STANDING,), CommitState.STANDING: (CommitState.SCRATCH,)}


class SwapSpace:
    """Locked run directories with one swap file each; none at all when nothing is on NVMe. Safe to use from any thread.

    What was opened is closed by the ExitStack that was given to `open_swap_space` or `adopt_swap_space`.
    """

    def __init__(
        self, runs: Sequence[RunDirectory], files: Sequence[DirectFile], state: CommitState, removed: Sequence[Removed]
    ) -> None:
        self.files = tuple(files)
        self.run_paths = tuple(run.path for run in runs)
        self.removed = tuple(removed)  # dead runs found at the start
        self._runs = tuple(runs)
        self._lock = threading.Lock()
        self._lifecycle = Lifecycle("Swap space", state, COMMIT_MOVES)

    @property
    def state(self) -> CommitState:
        return self._lifecycle.state

    def resident_path(self) -> Path:
        """Return the path of the file for what lives in RAM: where it is, or where there is most room for it.

        Raises StorageError when there is no run directory.
        """
        if not self.run_paths:
            raise StorageError(
                "Nothing of this run is on NVMe, so there is no directory to commit in place.",
                remedy="Write a checkpoint that is a copy.",
            )
        roomiest = max(self.run_paths, key=lambda path: free_bytes(path) or 0)
        return find_resident(self.run_paths) or roomiest / RESIDENT_NAME

    def consume(self) -> None:
        """Make the files scratch again, durably, before their content changes."""
        with self._lock:
            if self.state is CommitState.SCRATCH:
                return
            try:
                consume_commit(self.run_paths)
            except OSError as error:
                raise _not_changed("consume", self.run_paths[0], error) from error
            self._lifecycle.to(CommitState.SCRATCH)
            for run in self._runs:
                run.keep = False

    def commit(self, *, description: Mapping[str, object], resident_bytes: int, manifest: Mapping[str, object]) -> None:
        """Make the files a checkpoint. All their content is durable already."""
        with self._lock:
            try:
                write_commit(self.run_paths, description=description, resident_bytes=resident_bytes, manifest=manifest)
            except OSError as error:
                with suppress(OSError):  # some directories may have their manifest already
                    consume_commit(self.run_paths)
                raise _not_changed("commit", self.run_paths[0], error) from error
            self._lifecycle.to(CommitState.STANDING)

    def keep(self) -> None:
        """Leave the files when the directories are closed, if they are a checkpoint."""
        if self.state is CommitState.STANDING:
            for run in self._runs:
                run.keep = True

    def sync(self) -> None:
        """Make what was written durable."""
        for file in self.files:
            file.sync()


def open_swap_space(
    directories: Sequence[Path], run_name: str, file_bytes: Sequence[int], *, ledger: Ledger, resources: ExitStack
) -> SwapSpace:
    """Claim a run directory in each of `directories` and reserve its swap file; with no bytes at all touch nothing.

    Dead runs are removed first. On a file system in RAM the bytes are taken from the ledger. Raises StorageError for an
    unfit directory, ConfigError for one that is given twice, SwapSpaceError before anything is made where the room is
    missing, OverBudget.
    """
    if not any(file_bytes):
        return SwapSpace((), (), CommitState.SCRATCH, ())
    if not directories:
        raise ConfigError(f"{sum(file_bytes)} bytes go to NVMe, but no directory is given.", remedy="Give --nvme DIR.")
    paths = [check_directory(directory).path for directory in directories]
    require_distinct(directories)
    removed = _remove_dead(paths)
    require_space(tuple(zip(paths, file_bytes, strict=True)))
    runs, files = [], []
    for path, num_bytes in zip(paths, file_bytes, strict=True):
        _book(path, num_bytes, ledger, resources)
        runs.append(_owned(claim_run(path, run_name), resources))
        files.append(create_swap_file(runs[-1].path / SWAP_NAME, num_bytes))
        resources.callback(files[-1].close)
    return SwapSpace(runs, files, CommitState.SCRATCH, removed)


def adopt_swap_space(path: Path, *, ledger: Ledger, resources: ExitStack) -> tuple[SwapSpace, Commit]:
    """Take over the run directories of a checkpoint in place. It stays one until `SwapSpace.consume`.

    Raises CheckpointIncomplete, CheckpointMismatch, StorageError when a living run holds it, OverBudget.
    """
    run_paths = read_commit(path).run_paths
    runs = [_owned(adopt_run(run_path), resources) for run_path in run_paths]
    commit = read_commit(path)  # again: until now another run may have used it
    files = []
    for run_path, num_bytes in zip(run_paths, commit.file_bytes, strict=True):
        _book(run_path, num_bytes, ledger, resources)
        files.append(open_direct(run_path / SWAP_NAME, create=False))
        resources.callback(files[-1].close)
    removed = _remove_dead({run_path.parent: None for run_path in run_paths})
    return SwapSpace(runs, files, CommitState.STANDING, removed), commit


def _owned(run: RunDirectory, resources: ExitStack) -> RunDirectory:
    resources.callback(run.close)
    return run


def _remove_dead(directories: Iterable[Path]) -> tuple[Removed, ...]:
    return tuple(removed for directory in directories for removed in remove_dead_runs(directory))


def _book(path: Path, num_bytes: int, ledger: Ledger, resources: ExitStack) -> None:
    if memory_filesystem(path) is not None:
        ledger.take(Tier.CPU, "swap files in memory", num_bytes)
        resources.callback(ledger.give, Tier.CPU, "swap files in memory", num_bytes)


def _not_changed(what: str, path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Cannot {what} the checkpoint in {path}: {error.strerror or error}.",
        remedy="Check the free space and the mode of the directory.",
        errno=error.errno or 0,
    )
