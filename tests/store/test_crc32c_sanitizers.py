"""The native CRC32C under the address and undefined-behaviour sanitizers, and beside pages that may not be touched."""

from __future__ import annotations

from pathlib import Path

from sanitizers import build_with, run_sanitized

SOURCES = Path(__file__).parents[2] / "csrc" / "crc32c"
HAMMER = Path(__file__).parent / "native" / "crc32c_hammer.cpp"
KERNELS = ("portable.cpp", "sse42.cpp", "avx512.cpp", "arm.cpp")


def test_no_kernel_reads_a_byte_too_many(tmp_path: Path) -> None:
    """Every kernel, from odd addresses and up to the last byte before a page that is not there: one value, no complaint."""
    sources = (str(SOURCES / name) for name in KERNELS)
    build_with("address", tmp_path / "hammer", HAMMER, "-std=c++17", "-I", str(SOURCES), *sources)
    result = run_sanitized(tmp_path / "hammer")
    assert (result.returncode, result.stderr) == (0, "")
