"""Every line about an --nvme directory, in every state, on disks and mounts that are not this machine's."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import machine_samples as samples
import pytest

from infinity.doctor import storage
from infinity.doctor.machine import Limits, Machine
from infinity.doctor.storage import Place
from infinity.doctor.trials import Refusal, Trial
from infinity.doctor.verdict import State

NVME = "40 22 259:1 / /mnt/ssd rw,relatime - ext4 /dev/nvme0n1p1 rw\n"
SWITCH = "proc/sys/kernel/io_uring_disabled"
DOCKER = {"container": "docker"}


def refusal(number: int) -> dict[str, Any]:
    return {"message": "io_uring cannot be used.", "remedy": "The engine's own remedy.", "exit_code": 4, "errno": number}


def try_with(machine_options: dict[str, Any], root: Path, **changed: object) -> Place:
    """Return the place of a directory whose trial answered with these changes."""
    answer = {**samples.DIRECTORY, "device": "259:1", **changed}
    options = {"files": {}, **machine_options}
    files = {"proc/self/mountinfo": samples.ROOT_MOUNT + NVME, **options.pop("files")}
    trials = {"infinity.doctor.try_directory": Trial(answer=answer)}
    machine = samples.fake_machine(root, files=files, trials=trials, **options)
    verdict, place = storage.try_place(machine, Path("/mnt/ssd"))
    assert verdict.state is State.OK
    assert place is not None
    return place


def add_disk(machine: Machine, *, rotational: int, discard_max_bytes: int) -> None:
    """Give the machine a disk with one partition, 259:1."""
    queue = machine.root / "sys/devices/nvme0n1/queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text(f"{rotational}\n")
    (queue / "discard_max_bytes").write_text(f"{discard_max_bytes}\n")
    (machine.root / "sys/devices/nvme0n1/nvme0n1p1").mkdir()
    for place, name in (("sys/dev/block", "259:1"), ("sys/class/block", "nvme0n1p1")):
        (machine.root / place).mkdir(parents=True)
        (machine.root / place / name).symlink_to("../../devices/nvme0n1/nvme0n1p1")


@pytest.mark.parametrize(
    ("trial", "state", "exit_code"),
    [
        (Trial(refusal=Refusal("it is absent", "mkdir -p", 5, errno.ENOENT)), State.MISSING, 5),
        (Trial(refusal=Refusal("mounted read-only", "Give another.", 5, errno.EROFS)), State.FAILS, 5),
        (Trial(refusal=Refusal("not writable for user 7", "chown", 5, errno.EACCES)), State.FAILS, 5),
        (Trial(failure="no answer in 120 seconds"), State.FAILS, 5),
    ],
)
def test_a_directory_that_takes_no_files(tmp_path: Path, trial: Trial, state: State, exit_code: int) -> None:
    """C31: the storage error's own words, its exit code, and no further line about a directory that cannot be used."""
    machine = samples.fake_machine(tmp_path, trials={"infinity.doctor.try_directory": trial})
    verdict, place = storage.try_place(machine, Path("/mnt/ssd"))
    assert place is None
    assert (verdict.state, verdict.exit_code) == (state, exit_code)
    assert (trial.refusal.message if trial.refusal else trial.failure) in verdict.found


def test_a_directory_that_a_run_will_make(tmp_path: Path) -> None:
    """A directory that is only missing itself is fine, and the line says that it is absent so far."""
    trials = {"infinity.doctor.try_directory": Trial(answer={**samples.DIRECTORY, "is_new": True})}
    verdict, _ = storage.try_place(samples.fake_machine(tmp_path, trials=trials), Path("/mnt/ssd"))
    assert verdict.state is State.OK
    assert "absent so far" in verdict.found


@pytest.mark.parametrize(
    ("line", "is_memory", "state", "words"),
    [
        (NVME, False, State.OK, "ext4 on /dev/nvme0n1p1, mounted at /mnt/ssd"),
        ("40 22 0:50 / /mnt/ssd rw - tmpfs tmpfs rw\n", True, State.NOTE, "tmpfs is memory and no disk"),
        ("40 22 0:51 / /mnt/ssd rw - nfs4 server:/export rw\n", False, State.NOTE, "nfs4 on server:/export"),
        ("40 22 0:52 / /mnt/ssd rw - fuse.sshfs me@host: rw\n", False, State.NOTE, "a network mount"),
        ("40 22 0:53 / /mnt/ssd rw - overlay overlay rw,lowerdir=/a\n", False, State.NOTE, "gone with the container"),
        ("40 22 0:54 / /mnt/ssd rw - btrfs /dev/nvme0n1p1 rw\n", False, State.NOTE, "every write goes to a new place"),
        ("40 22 8:9 / /mnt/ssd rw - newfs /dev/x rw\n", False, State.OK, "newfs on /dev/x"),
    ],
)
def test_file_systems(tmp_path: Path, line: str, is_memory: bool, state: State, words: str) -> None:
    """C28: memory, network, a container's own layer and copy on write are notes, with docker's words for another disk."""
    files = {"proc/self/mountinfo": samples.ROOT_MOUNT + line}
    place = try_with({"files": files, "environment": DOCKER}, tmp_path, is_memory=is_memory)
    verdict = storage.check_file_system(place)
    assert verdict.state is state
    assert words in verdict.found
    if state is State.NOTE:
        assert ("chattr +C /mnt/ssd" if "btrfs" in line else "docker run -v /mnt/ssd:/mnt/ssd") in verdict.remedy


def test_a_system_without_a_table_of_mounts(tmp_path: Path) -> None:
    """Then the kind is unknown, which is no obstacle."""
    place = try_with({"files": {"proc/self/mountinfo": None}}, tmp_path)
    assert (storage.check_file_system(place).state, storage.check_file_system(place).found) == (State.OK, "unknown")


@pytest.mark.parametrize(
    ("free_bytes", "free_inodes", "state", "words"),
    [
        (12 * 10**12, 10**6, State.OK, "about 1000.0 billion parameters"),
        (12 * 10**12, None, State.OK, "TiB free"),
        (12 * 10**9, 10**6, State.NOTE, "about 1.0 billion parameters"),
        (12 * 10**3, 10**6, State.NOTE, "about 1000 parameters"),
        (12 * 10**12, 10, State.NOTE, "10 inodes free"),
    ],
)
def test_space(tmp_path: Path, free_bytes: int, free_inodes: int | None, state: State, words: str) -> None:
    """C29: how many parameters there is room for; little room and few inodes are notes."""
    place = try_with({}, tmp_path, free_bytes=free_bytes, free_inodes=free_inodes)
    verdict = storage.check_space(place)
    assert verdict.state is state
    assert words in verdict.found


def test_direct_io(tmp_path: Path) -> None:
    """C30: refused O_DIRECT is a note that names what it costs."""
    assert storage.check_direct_io(try_with({}, tmp_path / "a")).state is State.OK
    place = try_with({}, tmp_path / "b", io={**samples.ENGINE, "direct": False})
    assert storage.check_direct_io(place).state is State.NOTE
    assert "page cache" in storage.check_direct_io(place).found


@pytest.mark.parametrize(
    ("options", "number", "remedy"),
    [
        ({"environment": DOCKER}, errno.EPERM, "docker run --security-opt seccomp=unconfined"),
        ({"environment": DOCKER}, errno.ENOSYS, "docker run --security-opt seccomp=unconfined"),
        ({"environment": {"container": "podman"}}, errno.EPERM, "podman run --security-opt seccomp=unconfined"),
        ({"environment": {"KUBERNETES_SERVICE_HOST": "x"}}, errno.EPERM, "seccompProfile.type: Unconfined"),
        ({}, errno.EPERM, "the security module allow io_uring_setup"),
        ({}, errno.ENOSYS, "The engine's own remedy."),
        ({}, errno.ENOMEM, "The engine's own remedy."),
        ({"files": {SWITCH: "2\n"}}, errno.EPERM, "As root: `sysctl kernel.io_uring_disabled=0`"),
        ({"files": {SWITCH: "2\n"}, "environment": DOCKER}, errno.EPERM, "on the host: `sysctl kernel.io_uring_disabled=0`"),
        ({"files": {SWITCH: "0\n"}, "environment": DOCKER}, errno.EPERM, "docker run"),
        ({"modules": frozenset({"torch"})}, 0, "See the line on infinity._aio."),
    ],
)
def test_an_engine_other_than_io_uring(tmp_path: Path, options: dict[str, Any], number: int, remedy: str) -> None:
    """C22, C24: threads serve, a note says why, and the remedy is for what denied io_uring on this system."""
    io = {**samples.ENGINE, "engine": "threads", "uring_refusal": refusal(number)}
    place = try_with(options, tmp_path, io=io)
    verdict = storage.check_engine(place)
    assert (verdict.state, verdict.exit_code) == (State.NOTE, 0)
    assert verdict.found == "threads: wrote a file and read it back; io_uring cannot be used."
    assert remedy in verdict.remedy
    assert "nothing to register" in storage.check_registration(place).found


def test_io_uring_with_everything_registered(tmp_path: Path) -> None:
    """Then both lines are fine."""
    place = try_with({}, tmp_path)
    assert storage.check_engine(place).found == "uring: wrote a file and read it back"
    assert storage.check_registration(place).found == "files registered, buffers registered"
    assert {storage.check_engine(place).state, storage.check_registration(place).state} == {State.OK}


def test_buffers_that_cannot_be_registered(tmp_path: Path) -> None:
    """C27: a note with what the engine says of the limit, what was tried, and kubernetes' words."""
    notes = ["Buffers stay unregistered: 64.00 MiB are needed, the limit is 8.00 MiB."]
    io = {**samples.ENGINE, "registered_buffers": False, "registration_notes": notes}
    options = {"environment": {"KUBERNETES_SERVICE_HOST": "x"}, "limits": Limits(8 << 20, None)}
    place = try_with(options, tmp_path / "a", io=io)
    verdict = storage.check_registration(place)
    assert (verdict.state, verdict.exit_code) == (State.NOTE, 0)
    assert verdict.found == f"files registered, buffers not registered. {notes[0]}"
    assert "64.00 MiB" in verdict.needed
    assert "IPC_LOCK" in verdict.remedy
    assert "Nothing" in storage.check_registration(try_with({}, tmp_path / "b", io=io)).remedy


@pytest.mark.parametrize(("rotational", "state"), [(0, State.OK), (1, State.NOTE)])
@pytest.mark.parametrize("device", ["259:1", "0:54"])
def test_disks(tmp_path: Path, rotational: int, state: State, device: str) -> None:
    """The disk of a partition is found by its number, or by the mount's source where that number is made up (btrfs)."""
    place = try_with({}, tmp_path)
    add_disk(place.machine, rotational=rotational, discard_max_bytes=0)
    place = storage.place_of(place.machine, storage.read_directory_answer({**samples.DIRECTORY, "device": device}))
    assert place.disk is not None
    assert storage.check_disk(place).state is state


def test_a_file_system_without_a_disk(tmp_path: Path) -> None:
    """Network mounts and memory have no disk here, and nothing to trim."""
    place = try_with({"files": {"proc/self/mountinfo": None}}, tmp_path)
    assert place.disk is None
    assert storage.check_disk(place).state is State.OK
    assert storage.check_trim(place).state is State.OK


@pytest.mark.parametrize(
    ("discard", "options", "files", "state", "words"),
    [
        (0, "rw", {}, State.OK, "nothing to trim"),
        (1 << 30, "rw,discard", {}, State.OK, "mount option discard"),
        (1 << 30, "rw,discard=async", {}, State.OK, "mount option discard"),
        (1 << 30, "rw", {"etc/systemd/system/timers.target.wants/fstrim.timer": ""}, State.OK, "fstrim.timer"),
        (1 << 30, "rw", {"run/systemd/system/x": ""}, State.NOTE, "As root: `systemctl enable --now fstrim.timer`."),
        (1 << 30, "rw", {}, State.NOTE, "As root: `fstrim --all` (once a week)."),
        (1 << 30, "rw", {".dockerenv": ""}, State.NOTE, "On the host, once a week: `fstrim --all`."),
    ],
)
def test_trim(tmp_path: Path, discard: int, options: str, files: dict[str, str], state: State, words: str) -> None:
    """C153: where swap files come and go and nobody tells the disk, fstrim is suggested in this system's words."""
    mounts = f"40 22 259:1 / /mnt/ssd rw,relatime - ext4 /dev/nvme0n1p1 {options}\n"
    place = try_with({"files": {"proc/self/mountinfo": mounts, **files}}, tmp_path)
    add_disk(place.machine, rotational=0, discard_max_bytes=discard)
    verdict = storage.check_trim(storage.place_of(place.machine, place.directory))
    assert verdict.state is state
    assert words in f"{verdict.found} {verdict.remedy}"
