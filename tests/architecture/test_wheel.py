"""The wheel runs on a machine that has neither a compiler nor liburing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_wheel_needs_no_compiler_and_no_liburing(tmp_path: Path) -> None:
    """A wheel built in isolation brings both native modules; they load and an engine works with nothing else installed."""
    script = [sys.executable, "scripts/build_wheel.py", str(tmp_path)]
    result = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
