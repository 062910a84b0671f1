"""Names of checkpoints in a run's directory, and moves that never show a half-written or half-removed one."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from pathlib import Path

from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.manifest import sync_directory

_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial-(\d+)(?:-replaced)?")

# renameat2(2); Python's os module does not have it.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)


def step_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies: `<directory>/step-00000012`."""
    return directory / f"step-{step:08d}"


def partial_path(path: Path) -> Path:
    """Return the name that a checkpoint has while this process writes or removes it."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}")


def list_steps(directory: Path) -> tuple[Path, ...]:
    """Return the directories that have a checkpoint's name, complete or not, newest step first."""
    with storage_errors("Reading", directory):
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return tuple(path for _, path in sorted(found, reverse=True))


def publish(partial: Path, final: Path) -> None:
    """Give a whole, synced directory its final name; one that had the name before is left at `partial`."""
    with storage_errors("Renaming", partial):
        if final.exists():
            _exchange(partial, final)
        else:
            os.rename(partial, final)
    sync_directory(final.parent)


def discard(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a kill in between leaves a partial one."""
    partial = partial_path(path)
    with storage_errors("Removing", path):
        os.rename(path, partial)
        shutil.rmtree(partial)


def remove_leftovers(directory: Path) -> None:
    """Remove the partial checkpoints of processes that are gone, and of this one, which writes one at a time."""
    with storage_errors("Reading", directory):
        partials = [(path, int(match[1])) for path in directory.iterdir() if (match := _PARTIAL.fullmatch(path.name))]
    for path, pid in partials:
        if pid == os.getpid() or not alive(pid):
            with storage_errors("Removing", path):
                shutil.rmtree(path)


def alive(pid: int) -> bool:
    """Return whether a process of this number runs on this machine."""
    return Path(f"/proc/{pid}").exists()


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one atomic step, or in two renames on file systems that cannot (NFS)."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    aside = one.with_name(f"{one.name}-replaced")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)
