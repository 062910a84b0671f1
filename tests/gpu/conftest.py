"""Tests on a real CUDA device; they share the models of the engine's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# cuBLAS asks for it at its first product, which deterministic kernels then need.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """Skip without a device; leave its memory as it was found."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """A directory for swap files."""
    directory = tmp_path / "nvme"
    directory.mkdir()
    return directory
