"""Limits of host memory: the texts of the kernel, nested control groups, and what wins."""

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
import torch

from infinity.byte_sizes import GIB, KIB, MIB
from infinity.memory.limits import (
    CgroupMount,
    cgroup_directories,
    cgroup_room,
    host_limit_bytes,
    parse_cgroup_mounts,
    parse_cgroup_paths,
    parse_key_values,
    peak_rss_bytes,
    reset_peak_rss,
    rss_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
V1_CGROUP = """\
12:pids:/docker/4f2a
11:cpu,cpuacct:/docker/4f2a
9:memory:/docker/4f2a/job:7
0::/system.slice/containerd.service
"""
V2_CGROUP = "0::/user.slice/user-1000.slice/session-3.scope\n"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 /docker/4f2a /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid master:12 - cgroup cgroup rw,memory
"""
V2_MOUNTS = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"


def test_key_value_lines_of_every_kernel_file() -> None:
    """meminfo, status and memory.stat lines give numbers; lines with anything else are left out."""
    text = "VmHWM:\t  123 kB\nName:\tpython\nanon 4096\ntotal_cache 7\nempty:\nThreads:\t3\n"
    assert parse_key_values(text) == {"VmHWM": 123, "anon": 4096, "total_cache": 7, "Threads": 3}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (V1_CGROUP, {1: "/docker/4f2a/job:7", 2: "/system.slice/containerd.service"}),
        (V2_CGROUP, {2: "/user.slice/user-1000.slice/session-3.scope"}),
        ("4:memory,hugetlb:/x\n", {1: "/x"}),
        ("3:cpu:/a\n1:name=systemd:/b\n", {}),
        ("", {}),
    ],
)
def test_the_memory_group_is_found_in_both_versions(text: str, paths: dict) -> None:
    """Version 1 names the controller, version 2 is hierarchy 0; colons in a path belong to it."""
    assert parse_cgroup_paths(text) == paths


def test_mounts_that_can_limit_memory() -> None:
    """Only the memory hierarchy of version 1 and the unified one count; blanks in paths are unescaped."""
    assert parse_cgroup_mounts(V1_MOUNTS) == (CgroupMount(1, "/docker/4f2a", "/sys/fs/cgroup/memory"),)
    assert parse_cgroup_mounts(V2_MOUNTS) == (CgroupMount(2, "/", "/sys/fs/cgroup"),)
    spaced = "1 2 0:1 / /mnt/my\\040groups rw - cgroup2 none rw\n"
    assert parse_cgroup_mounts(spaced) == (CgroupMount(2, "/", "/mnt/my groups"),)


@pytest.mark.parametrize(
    ("mount", "path", "directories"),
    [
        (CgroupMount(2, "/", "/sys/fs/cgroup"), "/a/b", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        (CgroupMount(2, "/", "/sys/fs/cgroup"), "/", ["/sys/fs/cgroup"]),
        (CgroupMount(1, "/docker/4f", "/cg/memory"), "/docker/4f/job", ["/cg/memory/job", "/cg/memory"]),
        (CgroupMount(1, "/docker/4f", "/cg/memory"), "/docker/4f", ["/cg/memory"]),
        (CgroupMount(1, "/docker/4f", "/cg/memory"), "/elsewhere", ["/cg/memory"]),
        (CgroupMount(2, "/", "/sys/fs/cgroup"), "/../sibling", ["/sys/fs/cgroup"]),
    ],
)
def test_every_group_up_to_the_mount_is_asked(mount: CgroupMount, path: str, directories: list[str]) -> None:
    """Nested groups, a container's own part of the hierarchy, and groups of another namespace."""
    assert cgroup_directories(mount, path) == tuple(map(PurePosixPath, directories))


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "version", "room"),
    [
        ("max\n", "5\n", "", 2, None),
        ("9223372036854771712\n", "5\n", "", 1, None),
        ("1000\n", "300\n", "anon 200\ninactive_file 60\nactive_file 40\n", 2, 800),
        ("1000\n", "300\n", "inactive_file 999\ntotal_inactive_file 60\ntotal_active_file 40\n", 1, 800),
        ("1000\n", "1200\n", "", 2, 0),
        ("1000\n", "50\n", "inactive_file 80\n", 2, 1000),
    ],
)
def test_room_under_a_limit(limit: str, usage: str, stat: str, version: int, room: int | None) -> None:
    """A limit leaves what is not used, page cache counting as free; "max" and version 1's huge number limit nothing."""
    assert cgroup_room(limit, usage, stat, version) == room


def fake_kernel(root: Path, limits: dict[str, str], usage: int = 100 * MIB) -> dict[str, Path]:
    """Write the files that a process in group /job/rank of a version 2 hierarchy would see."""
    groups = root / "cgroup"
    (root / "meminfo").write_text(MEMINFO)
    (root / "cgroup_text").mkdir()
    proc = root / "cgroup_text"
    (proc / "cgroup").write_text("0::/job/rank\n")
    (proc / "mountinfo").write_text(f"29 23 0:26 / {groups} rw - cgroup2 cgroup2 rw\n")
    for group in ("", "job", "job/rank"):
        (groups / group).mkdir(exist_ok=True)
        if group in limits:
            (groups / group / "memory.max").write_text(limits[group])
            (groups / group / "memory.current").write_text(f"{usage}\n")
            (groups / group / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    return {"proc": proc, "meminfo": root / "meminfo"}


@pytest.mark.parametrize(
    ("limits", "num_bytes", "source"),
    [
        ({}, 8388608 * KIB, "RAM available"),
        ({"job": "max", "job/rank": "max"}, 8388608 * KIB, "RAM available"),
        ({"job": "max", "job/rank": str(2 * GIB)}, 2 * GIB - 100 * MIB, "job/rank/memory.max"),
        ({"job": str(GIB), "job/rank": str(2 * GIB)}, GIB - 100 * MIB, "job/memory.max"),
        ({"job/rank": str(64 * GIB)}, 8388608 * KIB, "RAM available"),
    ],
)
def test_the_least_limit_wins_and_is_named(tmp_path: Path, limits: dict, num_bytes: int, source: str) -> None:
    """C33: RAM, the process's own group and every group above it are compared, and the answer says which one it is."""
    limit = host_limit_bytes(**fake_kernel(tmp_path, limits))
    assert limit.num_bytes == num_bytes
    assert source in limit.source


def test_a_kernel_without_control_groups(tmp_path: Path) -> None:
    """Missing files mean no such limit."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert host_limit_bytes(proc=tmp_path / "none", meminfo=tmp_path / "meminfo").source == "RAM available"


def test_an_address_space_limit_counts() -> None:
    """C33: under `ulimit -v` what is not mapped yet is the limit; the module needs no torch to say so."""
    script = """
import resource, sys
from infinity.memory.limits import host_limit_bytes
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
limit = host_limit_bytes()
print(limit.source, limit.num_bytes < 1 << 30, limit.num_bytes > 1 << 28, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split() == ["address", "space", "(ulimit", "-v)", "True", "True", "False"]


def test_this_machine_has_a_limit_below_its_memory() -> None:
    """On the real files the answer is positive and at most all of the RAM."""
    total = parse_key_values(Path("/proc/meminfo").read_text())["MemTotal"] * KIB
    assert 0 < host_limit_bytes().num_bytes <= total


def test_resident_set_and_its_peak() -> None:
    """The resident set follows an allocation, the peak keeps it, and a reset lets the peak start again."""
    before = rss_bytes()
    ballast = torch.ones(48 * MIB, dtype=torch.uint8)
    assert rss_bytes() - before >= 47 * MIB
    del ballast
    assert peak_rss_bytes() - before >= 47 * MIB
    if not reset_peak_rss():
        pytest.skip("this kernel does not let a process reset its peak")
    assert peak_rss_bytes() - rss_bytes() < 16 * MIB
