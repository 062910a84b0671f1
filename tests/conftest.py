"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Tiny tensors gain nothing from two threads, and on a busy machine two threads that wait for each other lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def compute_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that are not marked gpu mean the CPU, also on a machine that has a GPU."""
    build = sys.modules.get("infinity.engine.build")
    if build is None or request.node.get_closest_marker("gpu") is not None:
        yield
        return
    opened = build.open_compute_device
    build.open_compute_device = sys.modules["infinity.memory.device"].host_device
    yield
    build.open_compute_device = opened
