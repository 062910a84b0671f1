"""Programs of C and C++ under the compiler's sanitizers: how they are compiled and run."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import pytest

SANITIZERS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
_ADDR_NO_RANDOMIZE = 0x0040000  # a thread sanitizer older than the kernel knows only the addresses without randomisation
_COMPILERS = {".c": ("CC", "cc"), ".cpp": ("CXX", "c++")}


def build_with(sanitizer: str, program: Path, main: Path, *arguments: str) -> None:
    """Compile `main` with further arguments into `program`, or skip where the compiler has no such sanitizer."""
    variable, default = _COMPILERS[main.suffix]
    compiler = [*shlex.split(os.environ.get(variable, default)), SANITIZERS[sanitizer], "-pthread"]
    empty = program.with_suffix(main.suffix)
    empty.write_text("int main(void) { return 0; }\n")
    trial = subprocess.run([*compiler, "-o", str(program), str(empty)], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {trial.stderr.strip().splitlines()[-1]}")
    always = ["-O1", "-g", "-Wall", "-Wextra", "-fno-sanitize-recover=all", "-o", str(program), str(main)]
    result = subprocess.run([*compiler, *always, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def run_sanitized(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program at the addresses that its sanitizer knows."""
    return subprocess.run(
        [str(program), *arguments], preexec_fn=_without_address_randomisation, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def _without_address_randomisation() -> None:
    ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
