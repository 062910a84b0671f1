"""Fixtures of the engine's tests: one torch thread, a directory on disk, a small file system that can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SMALL_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that a second thread only waits; results must not depend on it anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """A directory for swap files."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(point)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        # Lazily: it goes although a test that failed has left files open.
        subprocess.run(["umount", "--lazy", str(point)], check=True)
