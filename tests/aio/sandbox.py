"""What a process can deny itself, until it ends: system calls, locked memory, large files, room on the disk."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
BPF_LOAD_NUMBER, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
RETURN_ALLOW, RETURN_ERRNO = 0x7FFF0000, 0x00050000
IO_URING_SETUP = 425  # on every architecture
POSITIONED = (295, 296, 327, 328)  # preadv, pwritev, preadv2, pwritev2 on x86-64
CAP_IPC_LOCK = 14
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWNS = 0x20000

libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def unavailable(what: str) -> NoReturn:
    """End the process: the test is skipped."""
    sys.exit(f"no sandbox here: {what}, errno {ctypes.get_errno()}")


def deny(number: int, *system_calls: int) -> None:
    """Make the system calls fail with errno `number`."""
    instructions = [(BPF_LOAD_NUMBER, 0, 0, 0)]
    for call in system_calls:
        instructions += [(BPF_JUMP_EQUAL, 0, 1, call), (BPF_RETURN, 0, 0, RETURN_ERRNO | number)]
    code = b"".join(struct.pack("HBBI", *each) for each in [*instructions, (BPF_RETURN, 0, 0, RETURN_ALLOW)])
    program = Program(len(code) // 8, code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
        unavailable("seccomp")


def limit_locked_memory(num_bytes: int) -> None:
    """Set RLIMIT_MEMLOCK, and give up the capability with which it does not bind."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (num_bytes, num_bytes))
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted, inheritable of capabilities 0..31, then of 32..63
    if libc.capget(header, sets):
        unavailable("capget")
    words = [word & ~(1 << CAP_IPC_LOCK) if i < 3 else word for i, word in enumerate(struct.unpack("6I", sets.raw))]
    if libc.capset(header, struct.pack("6I", *words)):
        unavailable("capset")


def limit_file_size(num_bytes: int) -> None:
    """Set RLIMIT_FSIZE; Python ignores the signal that goes with it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def limit_descriptors(num_more: int) -> None:
    """Let the process open so many more files than it has open now."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    limit = highest + num_more  # the listing itself was the highest
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def mount_small_disk(kind: str, directory: Path, num_bytes: int, *, sector_bytes: int = 512) -> Path:
    """Mount a file system of that size, "tmpfs" or "ext4", which only this process sees and which goes with it."""
    private = libc.unshare(CLONE_NEWNS) == 0 and run("mount", "--make-rprivate", "/") is not None
    if not private:
        unavailable("a mount namespace of its own")
    point = directory / "small-disk"
    point.mkdir()
    if kind == "tmpfs":
        mounted = run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(point))
    else:
        mounted = mount_image(directory / "image", point, num_bytes, sector_bytes)
    if mounted is None:
        unavailable(f"mounting {kind}")
    return point


def mount_image(image: Path, point: Path, num_bytes: int, sector_bytes: int) -> str | None:
    image.write_bytes(b"")
    with image.open("r+b") as file:
        file.truncate(num_bytes)
    device = run("losetup", "--find", "--show", "--sector-size", str(sector_bytes), str(image))
    if device is None:
        return None
    try:
        made = run("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-m", "0", device)
        return None if made is None else run("mount", "-t", "ext4", device, str(point))
    finally:
        run("losetup", "--detach", device)  # as soon as it is no longer mounted


def run(*command: str) -> str | None:
    """Return what a command prints; None where it fails or is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
