"""Checks of one --nvme directory: what it is, what works in it, and the disk below it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.filesystems import NETWORK_FILE_SYSTEMS
from infinity.aio.mounts import Mount, mount_of, read_mounts
from infinity.byte_sizes import GIB, format_bytes
from infinity.doctor.answers import DirectoryAnswer, read_directory_answer
from infinity.doctor.machine import Machine
from infinity.doctor.remedies import Setting, allow, on_the_host
from infinity.doctor.surroundings import Container
from infinity.doctor.trials import Refusal
from infinity.doctor.verdict import Verdict, fails, missing, note, ok
from infinity.errors import StorageError

ENOUGH_BYTES = 16 * GIB
ENOUGH_INODES = 1000  # a checkpoint in whole files takes some hundreds
_STATE_BYTES = 12  # of a bf16 parameter with everything on NVMe

_LAYERS = ("overlay", "aufs")
_TRIM_TIMERS = (
    "etc/systemd/system/timers.target.wants/fstrim.timer",
    "usr/lib/systemd/system/timers.target.wants/fstrim.timer",
)


@dataclass(frozen=True, slots=True)
class Disk:
    """The block device below a file system, as the kernel describes it."""

    rotational: bool
    takes_discards: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that takes swap files, the mount that it is on, and the disk below."""

    machine: Machine
    directory: DirectoryAnswer
    mount: Mount | None  # None where the system has no table of mounts
    disk: Disk | None  # None for file systems without a block device of their own


def try_place(machine: Machine, directory: Path) -> tuple[Verdict, Place | None]:
    """Use a directory as a run would; return whether it takes swap files, and if so its place."""
    needed = "a directory that this user may write to"
    trial = machine.run_trial("infinity.doctor.try_directory", str(directory))
    if trial.refusal is not None:
        refusal = trial.refusal
        judge = missing if refusal.errno == errno.ENOENT else fails
        return judge(refusal.message, needed=needed, remedy=refusal.remedy, exit_code=refusal.exit_code), None
    if trial.answer is None:
        verdict = fails(
            f"it could not be tried: {trial.failure}", needed=needed, exit_code=StorageError.exit_code,
            remedy="See the lines on packages and modules; look at the disk or the network mount.",
        )  # fmt: skip
        return verdict, None
    place = place_of(machine, read_directory_answer(trial.answer))
    is_new = ", absent so far: a run makes it" if place.directory.is_new else ""
    return ok(f"takes files{is_new}", needed=needed), place


def place_of(machine: Machine, directory: DirectoryAnswer) -> Place:
    """Return a directory with what the system knows of its place."""
    mount = mount_of(Path(directory.path), read_mounts(machine.root / "proc/self/mountinfo"))
    return Place(machine, directory, mount, _disk(machine, directory.device, mount))


def check_file_system(place: Place) -> Verdict:
    """What kind of file system it is: memory, network, a container's own layer, or a disk's."""
    needed = "a local disk's file system, ext4 or XFS for example"
    kind = place.mount.file_system if place.mount else "unknown"
    found = f"{kind} on {place.mount.source}, mounted at {place.mount.point}" if place.mount else kind
    remedy = allow(Setting.DISK, place.machine.surroundings)
    if place.directory.is_memory:
        return note(f"{kind} is memory and no disk: what is stored there takes RAM", needed=needed, remedy=remedy)
    if kind in NETWORK_FILE_SYSTEMS:
        return note(f"{found}: a network mount, each byte crosses the network", needed=needed, remedy=remedy)
    if kind == "btrfs":
        return note(
            f"{found}: every write goes to a new place, so that swap files break into pieces", needed=needed,
            remedy=f"`chattr +C {place.directory.path}` while it is empty, or give a directory on ext4 or XFS.",
        )  # fmt: skip
    if kind in _LAYERS:
        return note(f"{found}: the container's own layer, slow and gone with the container", needed=needed, remedy=remedy)
    return ok(found, needed=needed)


def check_space(place: Place) -> Verdict:
    """How much room there is, in bytes and in files."""
    facts = place.directory
    needed = f"{_STATE_BYTES} bytes a parameter with all state on NVMe in bf16, and checkpoints"
    inodes = "" if facts.free_inodes is None else f" and {facts.free_inodes} inodes"
    room = _count(facts.free_bytes // _STATE_BYTES)
    found = f"{format_bytes(facts.free_bytes)}{inodes} free: room for about {room} parameters"
    if facts.free_inodes is not None and facts.free_inodes < ENOUGH_INODES:
        return note(found, needed=f"{ENOUGH_INODES} inodes or more", remedy="Remove small files, or give another directory.")
    if facts.free_bytes < ENOUGH_BYTES:
        return note(found, needed=needed, remedy="Free space or give a larger disk; `infinity clean DIR` removes dead runs.")
    return ok(found, needed=needed)


def check_direct_io(place: Place) -> Verdict:
    """Whether O_DIRECT works, tried by a write and a read."""
    needed = "O_DIRECT for reads and writes"
    if place.directory.io.direct:
        return ok("reads and writes bypass the page cache", needed=needed)
    return note(
        "refused: reads and writes go through the page cache, which costs speed and memory", needed=needed,
        remedy=allow(Setting.DISK, place.machine.surroundings),
    )  # fmt: skip


def check_engine(place: Place) -> Verdict:
    """Which I/O engine serves, found by one write and one read of a file."""
    needed = "io_uring; threads serve where it cannot be had"
    io = place.directory.io
    found = f"{io.engine}: wrote a file and read it back"
    if io.uring_refusal is None:
        return ok(found, needed=needed)
    return note(f"{found}; {io.uring_refusal.message}", needed=needed, remedy=_uring_remedy(place.machine, io.uring_refusal))


def check_registration(place: Place) -> Verdict:
    """Whether the engine could register a file and buffers, which makes requests cheaper."""
    io = place.directory.io
    needed = f"registered files, and buffers of {format_bytes(io.buffer_bytes)}"
    if io.engine != "uring":
        return ok(f"the engine {io.engine} has nothing to register", needed=needed)
    parts = {"files": io.registered_files, "buffers": io.registered_buffers}
    found = ", ".join(f"{name} {'registered' if works else 'not registered'}" for name, works in parts.items())
    if all(parts.values()):
        return ok(found, needed=needed)
    limit = place.machine.limits.locked_bytes
    binds = limit is not None and limit < io.buffer_bytes and not place.machine.may_lock_memory
    remedy = allow(Setting.LOCKED_MEMORY, place.machine.surroundings) if binds else "Nothing: it costs a little CPU time."
    return note(" ".join([f"{found}.", *io.registration_notes]), needed=needed, remedy=remedy)


def check_disk(place: Place) -> Verdict:
    """Whether the disk below is a solid-state disk."""
    needed = "an NVMe disk, or another SSD"
    if place.disk is None:
        return ok("the file system shows no disk of its own", needed=needed)
    if place.disk.rotational:
        return note(
            "rotational, the kernel says: a hard disk, or a virtual disk that says so wrongly", needed=needed,
            remedy=f"Measure it: `infinity bench nvme --nvme {place.directory.path}`; a hard disk is too slow for training.",
        )  # fmt: skip
    return ok("solid state", needed=needed)


def check_trim(place: Place) -> Verdict:
    """Whether the disk learns which blocks are free: an SSD slows down where swap files come and go and nobody tells it."""
    needed = "free blocks trimmed, at once or once a week: swap files come and go"
    machine, options = place.machine, place.mount.options if place.mount else frozenset[str]()
    if place.disk is None or not place.disk.takes_discards:
        return ok("nothing to trim: the disk takes no discards", needed=needed)
    if any(option.startswith("discard") for option in options):
        return ok("at once (mount option discard)", needed=needed)
    if any((machine.root / name).exists() for name in _TRIM_TIMERS):
        return ok("once a week (fstrim.timer)", needed=needed)
    command = "systemctl enable --now fstrim.timer" if machine.surroundings.has_systemd else "fstrim --all"
    if machine.surroundings.container is not Container.NONE:
        return note("nothing is seen here that trims", needed=needed, remedy="On the host, once a week: `fstrim --all`.")
    often = "" if machine.surroundings.has_systemd else " (once a week)"
    return note("nothing is seen that trims", needed=needed, remedy=f"As root: `{command}`{often}.")


def _uring_remedy(machine: Machine, refusal: Refusal) -> str:
    """Return what gives io_uring back, by what took it away."""
    if not machine.has_module("infinity._aio"):
        return "See the line on infinity._aio."
    if refusal.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return refusal.remedy
    switch = (machine.text("proc/sys/kernel/io_uring_disabled") or "0").strip()
    if refusal.errno != errno.ENOSYS and switch != "0":
        return on_the_host("sysctl kernel.io_uring_disabled=0", machine.surroundings)
    if refusal.errno == errno.ENOSYS and machine.surroundings.container is Container.NONE:
        return refusal.remedy
    return allow(Setting.IO_URING, machine.surroundings)


def _disk(machine: Machine, device: str, mount: Mount | None) -> Disk | None:
    """Return the disk with this device number, or else the one that the mount names as its source."""
    places = [machine.root / "sys/dev/block" / device]
    if mount is not None:
        places.append(machine.root / "sys/class/block" / Path(mount.source).name)
    for place in places:
        for queue in (place / "queue", place.resolve().parent / "queue"):  # a partition's queue is its disk's
            if queue.is_dir():
                return Disk(_number(queue / "rotational") == 1, _number(queue / "discard_max_bytes") > 0)
    return None


def _number(file: Path) -> int:
    return int(file.read_text()) if file.is_file() else 0


def _count(number: int) -> str:
    """Return a number of parameters as people say it: "1.2 billion"."""
    for word, factor in (("billion", 10**9), ("million", 10**6)):
        if number >= factor:
            return f"{number / factor:.1f} {word}"
    return str(number)
