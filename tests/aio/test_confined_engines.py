"""Engines in processes to which the system denies something, for real: seccomp, limits, full disks, sectors, rights."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sandbox
from aio_cases import HERE, OPENERS, run_confined

from infinity.aio import uring

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the means of denying are Linux's")
needs_ring = pytest.mark.skipif(uring._lib is None, reason="built without liburing")

PAGE = 4096
KINDS = [kind for kind in OPENERS if kind != "uring" or uring._lib is not None]


@needs_ring
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_io_uring_denied_by_seccomp(tmp_path: Path, number: int) -> None:
    """C23, C24: under a real seccomp filter threads move the same bytes, and one sentence names the docker flag."""
    answer = run_confined("denied", number, tmp_path)
    assert (answer["probed"], answer["engine"], answer["same"]) == ("threads", "threads", True)
    [note] = [note for note in answer["notes"] if "io_uring" in note]
    assert "--security-opt seccomp=unconfined" in note
    assert f"errno {number}" in note
    assert "Threads do the I/O instead." in note
    assert "--security-opt seccomp=unconfined" in answer["refusal"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the system calls are x86-64's")
def test_all_but_plain_reads_and_writes_denied(tmp_path: Path) -> None:
    """C23, C24: where neither io_uring nor preadv is allowed, which only trying shows, the buffered engine does it."""
    answer = run_confined("denied", errno.ENOSYS, tmp_path, *sandbox.POSITIONED)
    assert (answer["probed"], answer["same"]) == ("buffered", True)
    [note] = [note for note in answer["notes"] if note.startswith('The engine "threads"')]
    assert "errno 38" in note
    assert note.endswith('The engine "buffered" does the I/O instead.')
    assert any("page cache" in note for note in answer["notes"])


@pytest.mark.parametrize("limit", [64 << 10, 8 << 20])
def test_little_locked_memory(tmp_path: Path, limit: int) -> None:
    """C25: with RLIMIT_MEMLOCK of 64 KiB or 8 MiB, binding for this user, every engine moves 16 MiB, registered or not.

    What does not fit the limit is not registered, and a note says so; what fits is.
    """
    answer = run_confined("little_locked_memory", limit, tmp_path, 16 << 20, 1 << 20)
    assert answer.pop("probed") == KINDS[0]
    assert all(facts["same"] for facts in answer.values())
    assert not any(facts["buffers"] or facts["notes"] for name, facts in answer.items() if not name.startswith("uring"))
    for size in (16 << 20, 1 << 20) if "uring" in KINDS else ():
        facts = answer[f"uring {size}"]
        assert facts["buffers"] is (size < limit)
        assert len(facts["notes"]) == (0 if size < limit else 1)
        assert all("ulimit -l" in note for note in facts["notes"])


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """C11: a write that the kernel cuts off at the limit (a real short write) fails at that byte, with a remedy."""
    for kind, error in run_confined("files_of_six_pages", tmp_path).items():
        assert error["errno"] == errno.EFBIG, kind
        assert f"write of {4 * PAGE} bytes at offset {6 * PAGE} of {tmp_path / kind} failed: File too large" in error["text"]
        assert "ulimit -f" in error["remedy"]
        assert error["kept"]
        assert error["next"]


@pytest.mark.parametrize("filesystem", ["tmpfs", "ext4"])
def test_a_full_disk(tmp_path: Path, filesystem: str) -> None:
    """C3, C145: a real full disk fails the write with path and free bytes, serves the next, and keeps no probe file."""
    for kind, error in run_confined("full_disk", filesystem, tmp_path).items():
        assert error["direct"] is (filesystem == "ext4"), kind
        assert (error["kind"], error["errno"]) == ("SwapSpaceError", errno.ENOSPC)
        assert error["path"] in error["text"]
        assert "bytes are free" in error["text"]
        assert error["next"]
        assert error["probe"]["kind"] == "SwapSpaceError"
        assert "bytes are free" in error["probe"]["text"]
        assert error["left"] == ["file", "filler"]


def test_a_disk_with_large_sectors(tmp_path: Path) -> None:
    """C30: on a disk with sectors of 4,096 bytes a direct file counts in those, so that no rest of a piece is refused."""
    for kind, found in run_confined("large_sectors", tmp_path).items():
        assert found["granules"] == [PAGE, PAGE], kind
        assert found["direct"]
        assert found["same"] == [True, True]
        assert found["small"]["errno"] == errno.EINVAL
        assert f"multiples of {PAGE}" in found["small"]["remedy"]


@pytest.mark.skipif(os.geteuid() != 0, reason="everybody else is an ordinary user already")
def test_an_ordinary_user() -> None:
    """C24, C145: a user without rights gets every engine in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:  # not below tmp_path, which only its owner may enter
        assert run_confined("as_nobody", directory) == {kind: kind for kind in KINDS}


@needs_ring
def test_too_few_descriptors_for_another_ring(tmp_path: Path) -> None:
    """C27: where one more ring is refused threads, which need no descriptor, do its work; by name it is an error."""
    answer = run_confined("few_descriptors", tmp_path)
    assert answer["engines"] == ["uring", "threads", "threads"]
    assert answer["same"] == [True, True, True]
    assert "threads" not in answer
    assert "Too many open files (errno 24)" in answer["uring"]
    assert "ulimit -n" in answer["buffered"]


def test_several_processes_with_several_engines(tmp_path: Path) -> None:
    """C27: four processes with two engines of each kind, under a memlock limit of 64 KiB, do not disturb each other."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, str(HERE / "confined.py"), "several_engines", str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(64 << 10)], env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    for output, errors in outputs:
        if "no sandbox here" in errors:
            pytest.skip(errors.strip())
        assert json.loads(output) == {"same": True, "engines": [kind for kind in KINDS for _ in range(2)]}, errors
