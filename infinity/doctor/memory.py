"""Checks of memory and of limits: RAM and control groups, huge pages, shared memory, locked memory, open files."""

from __future__ import annotations

import re

from infinity.byte_sizes import GIB, KIB, MIB, format_bytes
from infinity.doctor.answers import IO_BUFFER_BYTES
from infinity.doctor.machine import Machine
from infinity.doctor.remedies import Setting, allow, on_the_host
from infinity.doctor.verdict import Verdict, fails, note, ok
from infinity.errors import DoesNotFit
from infinity.memory.limits import host_limit_bytes, parse_key_values

LEAST_BYTES = (
    384 * MIB
)  # what Python and torch take before any model exists, measured as memory.base does, and a little more
ENOUGH_BYTES = 2 * GIB
SHARED_BYTES = GIB
LEAST_FILES, ENOUGH_FILES = 64, 1024
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


def check_memory(machine: Machine) -> Verdict:
    """How much memory can still be taken, and what sets the limit: RAM, a control group, or `ulimit -v`."""
    limit = host_limit_bytes(proc=machine.root / "proc/self", meminfo=machine.root / "proc/meminfo")
    total_bytes = parse_key_values(machine.text("proc/meminfo") or "").get("MemTotal", 0) * KIB
    found = f"{format_bytes(limit.num_bytes)} can be taken, set by {limit.source}; RAM {format_bytes(total_bytes)}"
    needed = f"{format_bytes(LEAST_BYTES)} before any model, {format_bytes(ENOUGH_BYTES)} for models that are worth it"
    remedy = allow(Setting.MEMORY, machine.surroundings)
    if limit.num_bytes < LEAST_BYTES:
        return fails(found, needed=needed, remedy=remedy, exit_code=DoesNotFit.exit_code)
    if limit.num_bytes < ENOUGH_BYTES:
        return note(found, needed=needed, remedy=remedy)
    return ok(found, needed=needed)


def check_huge_pages(machine: Machine) -> Verdict:
    """Whether large buffers get huge pages."""
    needed = "madvise or always"
    match = re.search(r"\[(\w+)\]", machine.text(_HUGE_PAGES) or "")
    if match is not None and match[1] in ("madvise", "always"):
        return ok(match[1], needed=needed)
    if match is None:
        return note(
            "this kernel has no transparent huge pages", needed=needed, remedy="Nothing; large buffers cost more time."
        )
    return note(
        f"{match[1]}: large buffers take more time to make and to use", needed=needed,
        remedy=on_the_host(f"echo madvise > /{_HUGE_PAGES}", machine.surroundings),
    )  # fmt: skip


def check_shared_memory(machine: Machine) -> Verdict:
    """How large /dev/shm is; several GPUs talk through it."""
    needed = f"{format_bytes(SHARED_BYTES)} where several GPUs train together; otherwise none"
    place = machine.root / "dev/shm"
    num_bytes = machine.total_bytes(place) if place.is_dir() else 0
    found = format_bytes(num_bytes) if num_bytes else "there is no /dev/shm"
    if num_bytes >= SHARED_BYTES:
        return ok(found, needed=needed)
    return note(found, needed=needed, remedy=allow(Setting.SHARED_MEMORY, machine.surroundings))


def check_locked_memory(machine: Machine) -> Verdict:
    """How much memory this process may lock: the buffers that io_uring registers count."""
    needed = f"{format_bytes(IO_BUFFER_BYTES)} or more to register the buffers of a small run; best is unlimited"
    limit = machine.limits.locked_bytes
    if limit is None:
        return ok("unlimited", needed=needed)
    if machine.may_lock_memory:
        return ok(f"{format_bytes(limit)}, which does not bind this process (CAP_IPC_LOCK)", needed=needed)
    if limit >= IO_BUFFER_BYTES:
        return ok(format_bytes(limit), needed=needed)
    return note(
        f"{format_bytes(limit)}: larger buffers stay unregistered, which costs CPU time", needed=needed,
        remedy=allow(Setting.LOCKED_MEMORY, machine.surroundings),
    )  # fmt: skip


def check_open_files(machine: Machine) -> Verdict:
    """How many files may be open at once."""
    needed = f"{LEAST_FILES} or more; {ENOUGH_FILES} for many directories and large checkpoints"
    limit = machine.limits.open_files
    if limit is None or limit >= ENOUGH_FILES:
        return ok("unlimited" if limit is None else str(limit), needed=needed)
    judge = fails if limit < LEAST_FILES else note
    return judge(str(limit), needed=needed, remedy=allow(Setting.OPEN_FILES, machine.surroundings))
