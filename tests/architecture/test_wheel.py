"""The wheel runs on a machine that has neither a compiler nor liburing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_wheel_needs_no_compiler_and_no_liburing(tmp_path: Path) -> None:
    """C21: a wheel built in isolation brings the native modules; they load, an engine works, the doctor is content."""
    script = [sys.executable, "scripts/build_wheel.py", str(tmp_path)]
    result = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
