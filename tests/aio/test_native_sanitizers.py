"""The native engine under the address, undefined-behaviour and thread sanitizers, driven by a C program of its own."""

from __future__ import annotations

import ctypes
import os
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAMMER = Path(__file__).parent / "native" / "hammer.c"
SANITIZERS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
NO_RING = 77  # the driver's exit status
ADDR_NO_RANDOMIZE = 0x0040000  # a thread sanitizer older than the kernel knows only the addresses without randomisation


def build(target: Path, sanitizer: str) -> None:
    """Compile the engine and its driver, or skip where the compiler has no such sanitizer."""
    builder = runpy.run_path(str(ROOT / "csrc" / "aio" / "build.py"))
    liburing = builder["find_liburing"]()
    if liburing is None:
        pytest.skip("no liburing to build against")
    compiler = [*shlex.split(os.environ.get("CC", "cc")), SANITIZERS[sanitizer], "-pthread"]
    empty = target.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    trial = subprocess.run([*compiler, "-o", str(target), str(empty)], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer: {trial.stderr.strip().splitlines()[-1]}")
    arguments = [
        "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-fno-sanitize-recover=all", "-I", str(ROOT / "csrc" / "aio"),
        "-Wl,--wrap=io_uring_submit_and_wait,--wrap=io_uring_queue_init", "-o", str(target), str(HAMMER),
        *(str(ROOT / source) for source in builder["_SOURCES"]), *liburing,
    ]  # fmt: skip
    result = subprocess.run([*compiler, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def without_address_randomisation() -> None:
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_complains(sanitizer: str, tmp_path: Path) -> None:
    """C27: submit, wait, register, close in flight, a dying ring and a hundred engines: no sanitizer complains."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    build(tmp_path / "hammer", sanitizer)
    result = subprocess.run(
        [str(tmp_path / "hammer"), str(tmp_path)], preexec_fn=without_address_randomisation,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if result.returncode == NO_RING:
        pytest.skip("there is no io_uring here")
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this thread sanitizer does not know the kernel's addresses, and they cannot be fixed here")
    assert (result.returncode, result.stderr) == (0, "")
