"""Fixtures of the tests over ranks: processes for the whole session, a directory for swap files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The models and settings of the engine's tests; ranks as threads, of comm's.
sys.path += [str(Path(__file__).resolve().parents[1] / room) for room in ("engine", "comm")]

from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that play the ranks of one job after another."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """A directory for swap files."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory
