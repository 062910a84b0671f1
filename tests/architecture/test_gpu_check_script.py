"""scripts/gpu-check is one command on every machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_says_one_sentence_and_succeeds() -> None:
    """No CUDA device: one line on standard output, exit code 0, nothing built and no results written."""
    results = ROOT / "bench" / "results" / "gpu_check.json"
    before = results.read_bytes() if results.exists() else None
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "scripts" / "gpu-check"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-check is left out: ")
    assert done.stdout.count("\n") == 1
    assert done.stdout.rstrip().endswith(".")
    assert (results.read_bytes() if results.exists() else None) == before
