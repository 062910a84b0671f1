"""Whether the kernel has killed for lack of memory: its counters in both versions of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.byte_sizes import MIB
from infinity.memory.oom import OomSign, OomVerdict, OomWatch
from infinity.memory.processes import process_memory

EATER = "data = b''\nimport sys, time; sys.stdin.readline()\nwhile True: data += bytes(1 << 20)"
V1 = Path("/sys/fs/cgroup/memory")


class Groups:
    """A process in a nested group, as files that a test writes."""

    def __init__(self, root: Path, version: int) -> None:
        self.process, self.mount = root / "proc", root / "groups"
        self.inner = self.mount / "job" / "rank"
        self.inner.mkdir(parents=True)
        self.process.mkdir()
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
        line = "0::/job/rank\n" if version == 2 else "4:memory:/job/rank\n"
        (self.process / "cgroup").write_text(line)
        (self.process / "mountinfo").write_text(f"35 31 0:32 / {self.mount} rw - {kind} {kind} {options}\n")
        self.counter = {1: "memory.oom_control", 2: "memory.events"}[version]
        self.limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]

    def count(self, group: Path, number: int, limit: str) -> None:
        (group / self.counter).write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {number}\n")
        (group / self.limit).write_text(f"{limit}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_counter_that_rose_is_a_kill(tmp_path: Path, version: int) -> None:
    """What was counted before does not count; the tightest limit of the groups that count is named (C40)."""
    groups = Groups(tmp_path, version)
    groups.count(groups.inner, 3, str(64 * MIB))
    groups.count(groups.inner.parent, 5, "max" if version == 2 else str(2**63 - 4096))
    watch = OomWatch()
    watch.look(groups.process)
    assert watch.verdict() == OomVerdict(OomSign.NOT_KILLED)
    groups.count(groups.inner, 4, str(64 * MIB))
    groups.count(groups.inner.parent, 6, "max")
    watch.look(groups.process)
    assert watch.verdict() == OomVerdict(OomSign.KILLED, 64 * MIB)


def test_a_kill_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    """Where no group has a limit the machine's memory was used up."""
    groups = Groups(tmp_path, 2)
    groups.count(groups.inner, 0, "max")
    watch = OomWatch()
    watch.look(groups.process)
    groups.count(groups.inner, 1, "max")
    assert watch.verdict() == OomVerdict(OomSign.KILLED, None)


def test_without_counters_nothing_is_known(tmp_path: Path) -> None:
    """A process that is gone, or a kernel without groups, is no sign of either."""
    watch = OomWatch()
    watch.look(tmp_path / "gone")
    assert watch.verdict() == OomVerdict(OomSign.UNKNOWN)
    assert process_memory(tmp_path / "gone") is None


def test_a_process_that_the_kernel_kills_is_seen() -> None:
    """A real group with a limit, where this machine lets us make one: the kernel kills, and the watch knows (C40)."""
    group = V1 / f"infinity-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups of version 1 that this user may make")
    try:
        (group / "memory.limit_in_bytes").write_text(str(48 * MIB))
        with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as eater:
            (group / "cgroup.procs").write_text(str(eater.pid))
            watch = OomWatch()
            watch.look(Path(f"/proc/{eater.pid}"))
            memory = process_memory(Path(f"/proc/{eater.pid}"))
            assert memory is not None
            assert 0 < memory.resident_bytes <= memory.peak_bytes
            eater.communicate(b"\n")
        assert eater.returncode == -9
        assert watch.verdict() == OomVerdict(OomSign.KILLED, 48 * MIB)
    finally:
        group.rmdir()
