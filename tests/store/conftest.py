"""Fixtures of the store's tests: every engine that this machine has, and a small file system that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.aio.engine import Engine
from infinity.aio.select import open_engine
from infinity.errors import PlatformError

SMALL_BYTES = 4 << 20


@pytest.fixture(params=["threads", "uring"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    try:
        opened = open_engine(request.param, queue_depth=8, block_bytes=1 << 16)
    except PlatformError as error:
        pytest.skip(f"{request.param}: {error}")
    yield opened
    opened.close()


@pytest.fixture
def threads_engine() -> Iterator[Engine]:
    opened = open_engine("threads", queue_depth=4, block_bytes=1 << 16)
    yield opened
    opened.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    yield from _mounted(tmp_path / "small", f"size={SMALL_BYTES}")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    yield from _mounted(tmp_path / "read-only", f"size={SMALL_BYTES},ro")


def _mounted(point: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        # Lazily: it goes although a test that failed has left files open.
        subprocess.run(["umount", "--lazy", str(point)], check=True)
