"""A save killed at any moment, or met by a full disk, leaves the checkpoints before it and nothing that only looks whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import fake_buffers, fake_state, fake_units, names_in, require_content

from infinity.checkpoint.completeness import latest
from infinity.checkpoint.reader import open_checkpoint
from infinity.checkpoint.writer import write_checkpoint
from infinity.errors import StorageError, SwapSpaceError

CALLS = ("mkdir", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir")


def save(directory: Path, step: int, keep: int = 1, before: Callable[[int], None] = lambda index: None) -> None:
    write_checkpoint(directory, fake_units(step, before), fake_state(step), buffers=fake_buffers(step), keep=keep)


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; only a power cut would. So these tests need not wait for fsync."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def watch_calls(note: Callable[[str, tuple[Any, ...]], None], calls: tuple[str, ...] = CALLS) -> None:
    """Have every call that changes a file system announced before it is made (in this process, for good)."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(name, arguments)
            return original(*arguments, **options)

        return call

    for name in calls:
        setattr(os, name, watched(name, getattr(os, name)))


def save_in_a_child(directory: Path, step: int, kill_at: int, calls: tuple[str, ...] = CALLS) -> int:
    """Save in a forked process that kills itself before call number `kill_at`; return the wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    seen = 0

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    watch_calls(note, calls)
    save(directory, step)
    os._exit(0)


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_kill_at_any_call_leaves_the_previous_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Before every system call of a save the process is killed once: a whole checkpoint is always there (C121, C129)."""
    outcomes = []
    for kill_at in range(1000):
        run = tmp_path / str(kill_at)
        save(run, 1)
        status = save_in_a_child(run, 2, kill_at)
        newest = latest(run)
        assert newest.found is not None
        assert newest.passed_over == ()
        outcomes.append(newest.found.manifest.step)
        for path in run.iterdir():
            if "partial" not in path.name:
                with open_checkpoint(path) as checkpoint:
                    require_content(checkpoint)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        save(run, 3)
        assert names_in(run) == ["step-00000003"]
    assert outcomes == sorted(outcomes)
    assert outcomes.count(1) > 15
    assert outcomes.count(2) > 3


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_kill_while_a_step_is_written_again_keeps_one_of_both(tmp_path: Path) -> None:
    """Replacing a checkpoint of the same step has no moment without one (C121)."""
    for kill_at in range(1000):
        run = tmp_path / str(kill_at)
        save(run, 2)
        status = save_in_a_child(run, 2, kill_at, ("fsync", "rename", "unlink", "rmdir"))
        with open_checkpoint(run / "step-00000002") as checkpoint:
            require_content(checkpoint)
        if status == 0:
            assert names_in(run) == ["step-00000002"]
            return


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    """Each file and directory is synced before the rename that commits it, and the parent after it: power may fail too."""
    order = tmp_path / "order"
    pid = os.fork()
    if pid == 0:
        lines: list[str] = []

        def note(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "fsync":
                lines.append("fsync " + os.readlink(f"/proc/self/fd/{arguments[0]}").replace(f".partial-{os.getpid()}", ""))
            elif name == "rename":
                lines.append(f"rename {arguments[1]}".replace(f".partial-{os.getpid()}", ""))

        watch_calls(note)
        save(tmp_path / "run", 2)
        order.write_text("\n".join(lines))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    run = tmp_path / "run"
    assert [line.replace(f"{run}", "") for line in order.read_text().splitlines()] == [
        "fsync /step-00000002/units/00000.safetensors",
        "fsync /step-00000002/units/00001.safetensors",
        "fsync /step-00000002/buffers.safetensors",
        "fsync /step-00000002/units",
        "fsync /step-00000002/manifest.json.partial",
        "rename /step-00000002/manifest.json",
        "fsync /step-00000002",
        "rename /step-00000002",
        "fsync ",
    ]


def test_an_exception_in_a_source_removes_the_partial_checkpoint(tmp_path: Path) -> None:
    """An interrupt in the middle of a save leaves the earlier checkpoint alone."""
    save(tmp_path, 1)

    def interrupt(index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, before=interrupt)
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, SwapSpaceError), (errno.EIO, StorageError)])
def test_a_failed_write_names_operation_file_offset_and_errno(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    """The error is raised at the write, says where, and the previous checkpoint stays (C3)."""
    save(tmp_path, 1)
    original, calls = os.pwrite, []

    def failing(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 6:
            raise OSError(number, os.strerror(number))
        return original(fd, data[:100], offset)  # short writes are completed

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StorageError, match=r"Writing .*00000\.safetensors \(\d+ bytes at offset \d+\) failed") as caught:
        save(tmp_path, 2)
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert caught.value.remedy
    assert names_in(tmp_path) == ["step-00000001"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes 7 bytes at a time still gets every byte."""
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: original(fd, data[:7], offset))
    save(tmp_path, 1)
    with open_checkpoint(tmp_path) as checkpoint:
        require_content(checkpoint)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)  # also where a test that failed has left files open


def test_too_little_space_is_said_before_anything_is_written(small_disk: Path) -> None:
    """Needed and free bytes are named and the disk stays as it was."""
    save(small_disk, 1)
    (small_disk / "ballast").write_bytes(bytes(36 << 10))
    with pytest.raises(SwapSpaceError, match=r"needs .* \(\d+ bytes\), .* \(\d+ bytes\) are free"):
        save(small_disk, 2)
    assert names_in(small_disk) == ["ballast", "step-00000001"]


def test_a_disk_that_fills_during_the_save_keeps_the_previous_checkpoint(small_disk: Path) -> None:
    """Another writer takes the space in the middle: a typed error, no partial files, and a later save works (C107)."""
    run = small_disk / "run"
    save(run, 1)

    def fill(index: int) -> None:
        if index == 1:
            free = shutil.disk_usage(small_disk).free
            (small_disk / "ballast").write_bytes(bytes(free))

    with pytest.raises(SwapSpaceError, match="No space left"):
        save(run, 2, before=fill)
    assert names_in(run) == ["step-00000001"]
    with open_checkpoint(run) as checkpoint:
        require_content(checkpoint)
    (small_disk / "ballast").unlink()
    save(run, 2)
    assert names_in(run) == ["step-00000002"]
