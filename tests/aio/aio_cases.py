"""Buffers, requests and engines as the tests of aio need them."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infinity.aio.buffered import open_buffered
from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request, address_of
from infinity.aio.threads import open_threads
from infinity.aio.uring import open_uring

OPENERS = {"uring": open_uring, "threads": open_threads, "buffered": open_buffered}
HERE = Path(__file__).parent


def open_kind(
    kind: str, *, queue_depth: int = 8, block_bytes: int = 1 << 16, faults: Mapping[int, int] | None = None
) -> Engine:
    """Open an engine whose n-th completions are replaced as `faults` says."""
    return OPENERS[kind](queue_depth=queue_depth, block_bytes=block_bytes, faults=faults)


class Memory:
    """A page-aligned buffer."""

    def __init__(self, num_bytes: int) -> None:
        self.map = mmap.mmap(-1, max(num_bytes, 1))
        self.num_bytes = num_bytes
        self.address = address_of(self.map)

    def fill(self) -> bytes:
        """Fill with random bytes and return them."""
        data = os.urandom(self.num_bytes)
        self.map[:] = data
        return data

    def read(self, file: DirectFile, offset: int, *, start: int = 0, length: int | None = None) -> Request:
        return self._request(Op.READ, file, offset, start, length)

    def write(self, file: DirectFile, offset: int, *, start: int = 0, length: int | None = None) -> Request:
        return self._request(Op.WRITE, file, offset, start, length)

    def _request(self, op: Op, file: DirectFile, offset: int, start: int, length: int | None) -> Request:
        return Request(
            op, file, offset, self.address + start, self.num_bytes - start if length is None else length, self.map
        )


def pipe_file() -> tuple[DirectFile, int]:
    """Return a file whose reads block until something is written to the descriptor that comes with it."""
    reading, writing = os.pipe()
    return DirectFile(Path("a-pipe"), reading, direct=False, in_memory=True, device=0), writing


def num_engine_threads() -> int:
    """Return how many threads of this process belong to engines."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended meanwhile
            continue
    return names.count("infinity-aio")


def run_python(*arguments: str, timeout_seconds: int = 120) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own that can import infinity and the modules beside this one."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=timeout_seconds, check=False,
    )  # fmt: skip


def run_confined(job: str, *arguments: object) -> Any:
    """Return what a job of confined.py answers; skips the test where the system does not let a process confine itself so."""
    result = run_python(str(HERE / "confined.py"), job, *map(str, arguments))
    if "no sandbox here" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
