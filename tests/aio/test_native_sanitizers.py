"""The native engine under the address, undefined-behaviour and thread sanitizers, driven by a C program of its own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from sanitizers import SANITIZERS, build_with, run_sanitized

ROOT = Path(__file__).parents[2]
HAMMER = Path(__file__).parent / "native" / "hammer.c"
NO_RING = 77  # the driver's exit status


def build(target: Path, sanitizer: str) -> None:
    """Compile the engine and its driver, or skip where the compiler has no such sanitizer."""
    builder = runpy.run_path(str(ROOT / "csrc" / "aio" / "build.py"))
    liburing = builder["find_liburing"]()
    if liburing is None:
        pytest.skip("no liburing to build against")
    build_with(
        sanitizer, target, HAMMER, "-std=gnu11", "-I", str(ROOT / "csrc" / "aio"),
        "-Wl,--wrap=io_uring_submit_and_wait,--wrap=io_uring_queue_init",
        *(str(ROOT / source) for source in builder["_SOURCES"]), *liburing,
    )  # fmt: skip


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_complains(sanitizer: str, tmp_path: Path) -> None:
    """C27: submit, wait, register, close in flight, a dying ring and a hundred engines: no sanitizer complains."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    build(tmp_path / "hammer", sanitizer)
    result = run_sanitized(tmp_path / "hammer", str(tmp_path))
    if result.returncode == NO_RING:
        pytest.skip("there is no io_uring here")
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this thread sanitizer does not know the kernel's addresses, and they cannot be fixed here")
    assert (result.returncode, result.stderr) == (0, "")
