"""Run directories: who owns `<dir>/infinity-<run name>/`, whether that run still lives, and what may be removed.

    <dir>/infinity-<run name>[-2 ...]/
        lock             held with flock for as long as the run lives; the kernel lets go of it however the process ends
        owner.json       pid, boot id, process start time, command, created, run name, state
        swap.bin         the extents of the shards
        resident.bin     what lived in RAM, written by a commit in place
        committed.json   the manifest of a commit in place; while it is there nothing may remove the directory unasked
        consumed.json    a commit that a later write to swap.bin has destroyed

A run directory is complete from its first moment: it is filled under a temporary name and renamed, so that a directory named
`infinity-*` without a valid owner.json was not made here and is never touched. Removal unlinks the names above and nothing
else, by descriptor, and follows no link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from infinity.errors import ConfigError, StorageError
from infinity.store.durable import TEMPORARY_SUFFIX, sync_directory
from infinity.store.owner import OWNER_NAME, Owner, is_alive, read_owner, write_owner

LOCK_NAME = "lock"
SWAP_NAME, RESIDENT_NAME = "swap.bin", "resident.bin"
COMMITTED_NAME, CONSUMED_NAME = "committed.json", "consumed.json"

_KNOWN_NAMES = (
    SWAP_NAME, RESIDENT_NAME, COMMITTED_NAME, CONSUMED_NAME, COMMITTED_NAME + TEMPORARY_SUFFIX,
    OWNER_NAME + TEMPORARY_SUFFIX, LOCK_NAME, OWNER_NAME,
)  # fmt: skip
_PREFIX, _CLAIM_PREFIX = "infinity-", ".infinity-claim-"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# A claim takes milliseconds; one that is older and has no living owner was killed on its way.
_CLAIM_GRACE_SECONDS = 60.0
# Whoever looks whether a run lives holds its lock for a moment, as the other ranks of a job do while this one begins.
_LOOK_SECONDS = 0.5


class RunState(Enum):
    """What may happen to a run directory."""

    LIVE = "live"  # its process runs, or may run: hands off
    DEAD = "dead"  # its process is gone and it holds nothing of worth
    COMMITTED = "committed"  # its process is gone and it holds a checkpoint


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that was found."""

    path: Path
    state: RunState
    owner: Owner | None  # None for one that was killed before it could say
    num_bytes: int  # of disk


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal did."""

    path: Path
    num_bytes: int  # of disk given back
    left: tuple[str, ...]  # names that infinity does not know; with any of them the directory stays


class RunDirectory:
    """A run directory that this process owns. `close` lets go of it; not thread-safe."""

    def __init__(self, path: Path, lock_fd: int, *, keep: bool) -> None:
        self.path = path
        self.keep = keep  # whether `close` leaves the files: they are a checkpoint
        self._lock_fd: int | None = lock_fd

    def close(self) -> None:
        """Remove what infinity made, unless it is to be kept, and give up the lock. Closing twice is fine.

        Raises StorageError when something cannot be removed; the lock is given up all the same.
        """
        if self._lock_fd is None:
            return
        try:
            if not self.keep:
                _unlink_known(self.path)
        except OSError as error:
            raise _failed("remove", self.path, error) from error
        finally:
            # A forked child may still hold a copy of the descriptor, and a lock ends only with its last copy.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None


def claim_run(directory: Path, run_name: str) -> RunDirectory:
    """Make and lock `<directory>/infinity-<run_name>/`, or the first free `-2`, `-3`, ... after it.

    Raises ConfigError for a run name that is no plain file name, StorageError when the directory cannot be written.
    """
    if not _RUN_NAME.fullmatch(run_name):
        raise ConfigError(
            f"run name: {run_name!r} is not a plain file name.", remedy="Use letters, digits, '.', '_' and '-'."
        )
    temporary = directory / f"{_CLAIM_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(mode=0o700)
        lock_fd = _lock(temporary)
    except OSError as error:
        _unlink_known(temporary)
        raise _failed("make a run directory in", directory, error) from error
    try:
        write_owner(temporary, run_name, "created")
        return RunDirectory(_rename_to_free_name(temporary, directory / f"{_PREFIX}{run_name}"), lock_fd, keep=False)
    except OSError as error:
        _unlink_known(temporary)
        os.close(lock_fd)
        raise _failed("make a run directory in", directory, error) from error


def adopt_run(path: Path) -> RunDirectory:
    """Lock an existing run directory and write this process into its owner.json.

    Raises StorageError when it is no run directory or a living process holds it.
    """
    owner = read_owner(path)
    if owner is None:
        raise StorageError(f"{path} is not a run directory.", remedy="Give the directory that holds committed.json.")
    try:
        lock_fd = _lock(path)
    except BlockingIOError as error:
        raise StorageError(
            f"{path} is in use by process {owner.pid}.", remedy="Wait for that run or end it.", errno=error.errno or 0
        ) from error
    except OSError as error:
        raise _failed("lock", path, error) from error
    try:
        write_owner(path, owner.run_name, "adopted")
    except OSError as error:
        os.close(lock_fd)
        raise _failed("take over", path, error) from error
    return RunDirectory(path, lock_fd, keep=True)


def list_runs(directory: Path) -> tuple[Run, ...]:
    """Return the run directories in `directory`, by name. Raises StorageError when it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.name.startswith((_PREFIX, _CLAIM_PREFIX)) and entry.is_dir(follow_symlinks=False)
            )
    except OSError as error:
        raise _failed("list", directory, error) from error
    return tuple(run for run in (_examine(directory / name) for name in names) if run is not None)


def remove_run(path: Path, *, committed: bool = False) -> Removed:
    """Remove what infinity made in a run directory, and the directory if nothing else is in it.

    A directory with a checkpoint goes only when `committed` says so. Raises StorageError for one that is in use, that holds
    a checkpoint, or that is not a run directory.
    """
    run = _examine(path)
    if run is None:
        raise StorageError(f"{path} is not a run directory.", remedy="infinity removes only what it made itself.")
    if run.state is RunState.LIVE:
        pid = f" by process {run.owner.pid}" if run.owner else ""
        raise StorageError(f"{path} is in use{pid}.", remedy="Wait for that run or end it.", errno=errno.EBUSY)
    try:
        lock_fd = _lock(path)  # from here on nobody can adopt it
    except OSError as error:
        raise _failed("lock", path, error) from error
    try:
        if (path / COMMITTED_NAME).exists() and not committed:
            raise StorageError(f"{path} holds a checkpoint.", remedy="Resume from it, or say that it may go.")
        return Removed(path, run.num_bytes, _unlink_known(path))
    except StorageError:
        raise
    except OSError as error:
        raise _failed("remove", path, error) from error
    finally:
        os.close(lock_fd)


def remove_dead_runs(directory: Path) -> tuple[Removed, ...]:
    """Remove the directories of dead runs without a checkpoint and return what was removed.

    One that cannot be removed (another user's, or taken by another process in this moment) is left alone.
    """
    removed = []
    for run in list_runs(directory):
        if run.state is RunState.DEAD:
            with contextlib.suppress(StorageError):
                removed.append(remove_run(run.path))
    return tuple(removed)


def _rename_to_free_name(temporary: Path, wanted: Path) -> Path:
    number = 0
    while True:
        number += 1
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if os.path.lexists(target):
            continue
        try:
            os.rename(temporary, target)  # refused when a claim that came first has put its files there
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            sync_directory(target.parent)
            return target


def _lock(path: Path) -> int:
    """Return the locked descriptor. Raises BlockingIOError where somebody keeps the lock, who does not only look."""
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        give_up_at = time.monotonic() + _LOOK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(_LOOK_SECONDS / 100)
            else:
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _examine(path: Path) -> Run | None:
    owner = read_owner(path)
    if owner is None and not path.name.startswith(_CLAIM_PREFIX):
        return None
    return Run(path, _state_of(path, owner), owner, _disk_bytes(path))


def _state_of(path: Path, owner: Owner | None) -> RunState:
    if not _lock_is_free(path):
        return RunState.LIVE
    if (path / COMMITTED_NAME).exists():
        return RunState.COMMITTED
    if owner is None:
        return RunState.LIVE if _age_seconds(path) < _CLAIM_GRACE_SECONDS else RunState.DEAD
    return RunState.LIVE if is_alive(owner) else RunState.DEAD


def _lock_is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # another user's: not ours to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _disk_bytes(path: Path) -> int:
    total = 0
    for name in _KNOWN_NAMES:
        with contextlib.suppress(OSError):
            total += os.lstat(path / name).st_blocks * 512
    return total


def _unlink_known(path: Path) -> tuple[str, ...]:
    """Unlink the known regular files, then the directory if it is empty; return the names that are left."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    try:
        for name in _KNOWN_NAMES:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=descriptor)
        left = tuple(sorted(os.listdir(descriptor)))
    finally:
        os.close(descriptor)
    if not left:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()
    return left


def _failed(what: str, path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"Cannot {what} {path}: {error.strerror or error}.",
        remedy="Check the directory's owner and mode.",
        errno=error.errno or 0,
    )
