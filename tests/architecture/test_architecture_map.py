"""ARCHITECTURE.md shows the files that exist."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="the map is compared with git's list"
)
def test_map_lists_every_tracked_file_with_its_own_first_line() -> None:
    """The map in ARCHITECTURE.md is what `make map` writes from the tracked files."""
    result = subprocess.run(
        [sys.executable, "scripts/update_map.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"run `make map`:\n{result.stdout}{result.stderr}"
