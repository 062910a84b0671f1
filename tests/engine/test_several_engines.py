"""Several engines, no_sync, empty groups and one batch cut in several ways, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import conformance_engines as checks
import pytest

CHECKS = [checks.two_engines, checks.held_back, checks.splits_of_one_batch, checks.groups_without_parameters]


@pytest.mark.parametrize("tier", ["nvme", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_engines_are_torch(check: Callable[..., None], tier: str, nvme: Path) -> None:
    """C67 and what else each check says, element by element."""
    check(str(nvme), optim=tier, params=tier)
