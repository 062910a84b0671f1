"""Run directories: one owner each, dead ones recognised and removed, nothing of anybody else's touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_cases import make_store, odd_layouts, on_nvme

from infinity.aio.engine import Engine
from infinity.errors import ConfigError, StorageError
from infinity.store.directory import (
    RunState,
    adopt_run,
    claim_run,
    list_runs,
    remove_dead_runs,
    remove_run,
)
from infinity.store.swap_file import create_swap_file

SWAP_BYTES = 1 << 20

# A run that takes a directory, says so, and waits to be killed.
RUN = f"""
import sys, time
from pathlib import Path
from infinity.store.directory import claim_run, remove_dead_runs
from infinity.store.swap_file import create_swap_file
directory = Path(sys.argv[1])
removed = remove_dead_runs(directory)
run = claim_run(directory, "job")
file = create_swap_file(run.path / "swap.bin", {SWAP_BYTES})
print(run.path.name, len(removed), flush=True)
time.sleep(600)
"""


def start_run(directory: Path) -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen([sys.executable, "-c", RUN, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, removed = process.stdout.readline().split()
    return process, name, int(removed)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def forge_owner(path: Path, **changes: object) -> None:
    owner = json.loads((path / "owner.json").read_text())
    (path / "owner.json").write_text(json.dumps(owner | changes))


def test_killed_runs_are_recognised_and_removed_by_the_next(tmp_path: Path) -> None:
    """Three runs killed with SIGKILL leave at most one directory, under one stable name. C20."""
    for number in range(3):
        process, name, removed = start_run(tmp_path)
        try:
            assert (name, removed) == ("infinity-job", min(number, 1))
            assert [run.state for run in list_runs(tmp_path)] == [RunState.LIVE]
        finally:
            kill(process)
        (dead,) = list_runs(tmp_path)
        assert dead.state is RunState.DEAD
        assert dead.owner is not None
        assert (dead.owner.pid, dead.owner.run_name) == (process.pid, "job")
        assert dead.num_bytes >= SWAP_BYTES
    (removal,) = remove_dead_runs(tmp_path)
    assert removal.num_bytes >= SWAP_BYTES
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_nobody_takes_notice_of_is_dead(tmp_path: Path) -> None:
    """Killed, and still a zombie of whoever started it: its run is dead all the same. C20."""
    process, _, _ = start_run(tmp_path)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert [run.state for run in list_runs(tmp_path)] == [RunState.DEAD]
    finally:
        process.communicate()


def test_two_runs_of_one_name_get_a_directory_each(tmp_path: Path) -> None:
    """Another process's live run is never touched; the second of the same name is numbered."""
    process, name, _ = start_run(tmp_path)
    try:
        second = claim_run(tmp_path, "job")
        assert (name, second.path.name) == ("infinity-job", "infinity-job-2")
        assert remove_dead_runs(tmp_path) == ()
        with pytest.raises(StorageError, match=f"in use by process {process.pid}"):
            remove_run(tmp_path / "infinity-job")
        assert (tmp_path / "infinity-job" / "swap.bin").stat().st_size == SWAP_BYTES
        second.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["infinity-job"]
    finally:
        kill(process)


@pytest.mark.parametrize("num_looks", [1, 5])
def test_somebody_who_looks_does_not_stop_a_run_that_begins(
    num_looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks whether a run lives holds its lock for a moment, as other ranks do that begin at the same time."""
    flock, looks = fcntl.flock, iter(range(num_looks))

    def held_by_others(descriptor: int, operation: int) -> None:
        if next(looks, None) is not None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        flock(descriptor, operation)

    monkeypatch.setattr("infinity.store.directory.fcntl.flock", held_by_others)
    run = claim_run(tmp_path, "job")
    assert [found.state for found in list_runs(tmp_path)] == [RunState.LIVE]
    run.close()


def test_a_lock_is_enough_to_be_alive(tmp_path: Path) -> None:
    """Whatever owner.json says, a held lock means a living run: pids of another container mean nothing here."""
    run = claim_run(tmp_path, "job")
    forge_owner(run.path, pid=2**22 + 1)
    assert [found.state for found in list_runs(tmp_path)] == [RunState.LIVE]
    run.close()


@pytest.mark.parametrize("changes", [{"boot_id": "another"}, {"start_time": 1}, {"pid": 2**22 + 1}])
def test_a_free_lock_and_another_process_is_dead(tmp_path: Path, changes: dict[str, object]) -> None:
    """A reused pid, or one of before the last boot, does not keep a dead run alive. C20."""
    run = claim_run(tmp_path, "job")
    run.keep = True
    run.close()
    assert [found.state for found in list_runs(tmp_path)] == [RunState.LIVE]  # its process, this one, still runs
    forge_owner(run.path, **changes)
    assert [found.state for found in list_runs(tmp_path)] == [RunState.DEAD]


def make_dead_run(directory: Path, name: str = "job") -> Path:
    run = claim_run(directory, name)
    run.keep = True
    create_swap_file(run.path / "swap.bin", SWAP_BYTES).close()
    run.close()
    forge_owner(run.path, boot_id="another")
    return run.path


def test_a_checkpoint_is_never_garbage(tmp_path: Path) -> None:
    """A dead run with committed.json stays until somebody says that it may go."""
    path = make_dead_run(tmp_path)
    (path / "committed.json").write_text("{}")
    assert [run.state for run in list_runs(tmp_path)] == [RunState.COMMITTED]
    assert remove_dead_runs(tmp_path) == ()
    with pytest.raises(StorageError, match="holds a checkpoint"):
        remove_run(path)
    assert (path / "swap.bin").exists()
    assert remove_run(path, committed=True).left == ()
    assert not path.exists()


def test_removal_takes_only_what_infinity_made(tmp_path: Path) -> None:
    """Unknown files and links stay, what links point to too, and the directory with them."""
    path, precious = make_dead_run(tmp_path), tmp_path / "precious"
    precious.mkdir()
    (precious / "swap.bin").write_bytes(b"mine")
    (path / "notes.txt").write_bytes(b"mine")
    (path / "resident.bin").symlink_to(precious / "swap.bin")
    (path / "sub").mkdir()
    (removal,) = remove_dead_runs(tmp_path)
    assert removal.left == ("notes.txt", "resident.bin", "sub")
    assert sorted(item.name for item in path.iterdir()) == ["notes.txt", "resident.bin", "sub"]
    assert (precious / "swap.bin").read_bytes() == b"mine"


def test_opening_a_store_removes_dead_runs_and_says_which(tmp_path: Path, threads_engine: Engine) -> None:
    """The next run finds the space again and can tell the user so. C20."""
    dead = make_dead_run(tmp_path)
    store = make_store([tmp_path], threads_engine, on_nvme(odd_layouts()), run_name="job")
    assert [(removal.path, removal.left) for removal in store.removed_runs] == [(dead, ())]
    assert store.directories == (dead,)  # the name is free again
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_directories_that_only_look_alike_are_not_runs(tmp_path: Path) -> None:
    """No valid owner.json, a link, a file: none of them is listed, removed or claimed."""
    (tmp_path / "infinity-job").mkdir()
    (tmp_path / "infinity-job" / "swap.bin").write_bytes(b"mine")
    (tmp_path / "infinity-foreign").mkdir()
    (tmp_path / "infinity-foreign" / "owner.json").write_text('{"format": "something"}')
    (tmp_path / "infinity-file").write_bytes(b"mine")
    (tmp_path / "infinity-link").symlink_to(make_dead_run(tmp_path.parent / _made(tmp_path)), target_is_directory=True)
    assert list_runs(tmp_path) == ()
    with pytest.raises(StorageError, match="not a run directory"):
        remove_run(tmp_path / "infinity-job")
    run = claim_run(tmp_path, "job")
    assert run.path.name == "infinity-job-2"
    run.close()
    assert (tmp_path / "infinity-job" / "swap.bin").read_bytes() == b"mine"


def _made(tmp_path: Path) -> str:
    other = tmp_path.parent / f"{tmp_path.name}-other"
    other.mkdir()
    return other.name


def test_a_run_killed_while_claiming_is_removed_later(tmp_path: Path) -> None:
    """An unfinished claim is spared while it may still be going on, and removed afterwards."""
    unfinished = tmp_path / ".infinity-claim-1-abcd"
    unfinished.mkdir()
    (unfinished / "lock").touch()
    assert remove_dead_runs(tmp_path) == ()
    os.utime(unfinished, (time.time() - 3600, time.time() - 3600))
    assert [removal.path for removal in remove_dead_runs(tmp_path)] == [unfinished]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_does_not_outlive_its_run_in_a_forked_child(tmp_path: Path) -> None:
    """A data worker that was forked keeps a copy of the descriptor; closing the run unlocks all the same."""
    run = claim_run(tmp_path, "job")
    run.keep = True
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready_write)
        os.read(ready_read, 1)
        os._exit(0)
    try:
        run.close()
        forge_owner(run.path, boot_id="another")
        assert [found.state for found in list_runs(tmp_path)] == [RunState.DEAD]
    finally:
        os.close(ready_write)
        os.waitpid(child, 0)
        os.close(ready_read)


def test_the_owner_file_says_who(tmp_path: Path) -> None:
    """pid, boot id, start time, command, time and name are all there."""
    run = claim_run(tmp_path, "job")
    (found,) = list_runs(tmp_path)
    owner = found.owner
    assert owner is not None
    assert (owner.pid, owner.run_name, owner.state) == (os.getpid(), "job", "created")
    assert owner.command == tuple(sys.orig_argv)
    assert owner.start_time > 0
    run.close()


def test_adopting_a_live_run_is_refused(tmp_path: Path) -> None:
    """Only one process at a time owns a directory."""
    run = claim_run(tmp_path, "job")
    with pytest.raises(StorageError, match="in use"):
        adopt_run(run.path)
    run.close()
    with pytest.raises(StorageError, match="not a run directory"):
        adopt_run(run.path)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_run_name_must_be_a_plain_file_name(tmp_path: Path, name: str) -> None:
    """No name leads out of the directory."""
    with pytest.raises(ConfigError, match="is not a plain file name"):
        claim_run(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
