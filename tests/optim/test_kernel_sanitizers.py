"""The native Adam under the address, undefined-behaviour and thread sanitizers, driven by a C++ program of its own."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cpu_adam"
HAMMER = Path(__file__).parent / "native" / "team_hammer.cpp"
SANITIZERS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
ADDR_NO_RANDOMIZE = 0x0040000  # a thread sanitizer older than the kernel knows only the addresses without randomisation


def compiler(sanitizer: str, directory: Path) -> list[str]:
    """Return the compiler with the sanitizer, or skip where it has none."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), SANITIZERS[sanitizer], "-pthread"]
    (directory / "empty.cpp").write_text("int main() { return 0; }\n")
    trial = [*command, "-o", str(directory / "empty"), str(directory / "empty.cpp")]
    result = subprocess.run(trial, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {result.stderr.strip().splitlines()[-1]}")
    return command


def without_address_randomisation() -> None:
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_complains(sanitizer: str, tmp_path: Path) -> None:
    """Teams, callers in turn and every format of the scalar kernel leave nothing for a sanitizer to say."""
    program = tmp_path / "hammer"
    command = [
        *compiler(sanitizer, tmp_path), "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fno-sanitize-recover=all",
        "-ffp-contract=off", "-I", str(SOURCES), "-o", str(program), str(HAMMER),
        *(str(SOURCES / name) for name in ("team.cpp", "cores.cpp", "scalar.cpp")),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    result = subprocess.run(
        [str(program)], preexec_fn=without_address_randomisation, capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
