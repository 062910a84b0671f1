"""The output directory of a run: its name, its lock, the files in it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.failures import storage_errors
from infinity.errors import StorageError
from infinity.store.durable import write_json_durably

DEFAULT_PARENT = Path("runs")
_LOCK = "run.lock"


@dataclass(frozen=True, slots=True)
class Output:
    """The paths below `--output`."""

    directory: Path

    @property
    def plan(self) -> Path:
        return self.directory / "plan.json"

    @property
    def config(self) -> Path:
        return self.directory / "config.json"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.directory / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.directory / "weights"


def default_output(model_name: str) -> Output:
    """Return a directory that no run has yet: `runs/<model>-<date>-<time>`."""
    wanted = DEFAULT_PARENT / f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory, number = wanted, 1
    while directory.exists():
        number += 1
        directory = wanted.with_name(f"{wanted.name}-{number}")
    return Output(directory)


def check_output(output: Output) -> None:
    """Raise StorageError when the directory could not be made or written to; nothing is made."""
    directory = output.directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise StorageError(f"--output: {existing} is not a directory.", remedy="Give a directory; it is made when missing.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(
            f"--output: {existing} is not writable for user {os.geteuid()}.", remedy="Give a directory of your own."
        )


@contextmanager
def held(output: Output) -> Iterator[None]:
    """Make the directory and hold it for this process: two runs never share one. Raises StorageError.

    What was made here is removed again when the run leaves nothing in it.
    """
    directory = output.directory
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    with storage_errors("Making", directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)
        if made:
            _remove_unused(directory, made)


def _remove_unused(directory: Path, made: Sequence[Path]) -> None:
    with suppress(OSError):  # somebody else's by now, or removed under our hands
        if os.listdir(directory) == [_LOCK]:
            (directory / _LOCK).unlink()
            for path in made:
                path.rmdir()


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file, whole or not at all. Raises StorageError when the disk refuses."""
    with storage_errors("Writing", path):
        write_json_durably(path, content)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StorageError(
            f"--output: another run is writing into {directory}.",
            remedy="Give another directory, or end that run.",
            errno=error.errno or 0,
        ) from error
