"""The native Adam under the address, undefined-behaviour and thread sanitizers, driven by a C++ program of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitizers import SANITIZERS, build_with, run_sanitized

SOURCES = Path(__file__).parents[2] / "csrc" / "cpu_adam"
HAMMER = Path(__file__).parent / "native" / "team_hammer.cpp"


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_complains(sanitizer: str, tmp_path: Path) -> None:
    """Teams, callers in turn and every format of the scalar kernel leave nothing for a sanitizer to say."""
    sources = (str(SOURCES / name) for name in ("team.cpp", "cores.cpp", "scalar.cpp"))
    build_with(sanitizer, tmp_path / "hammer", HAMMER, "-std=c++17", "-ffp-contract=off", "-I", str(SOURCES), *sources)
    result = run_sanitized(tmp_path / "hammer")
    assert (result.returncode, result.stderr) == (0, "")
