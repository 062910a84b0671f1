"""What is asked of the kernel about the page cache."""

from __future__ import annotations

import os
from pathlib import Path

from bench_fakes import some_row

from infinity.bench.nvme_results import LongRun, cache_notes, slowdown_note
from infinity.bench.page_cache import resident_share


def test_the_share_of_a_file_in_the_page_cache_is_seen(tmp_path: Path) -> None:
    """A file that was just written is in the cache whole, unless the system drops it; an empty one is not."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDWR)
    try:
        assert resident_share(fd) == 1.0
        os.ftruncate(fd, 0)
        assert resident_share(fd) == 0.0
    finally:
        os.close(fd)


def test_reads_from_a_cache_are_said() -> None:
    """A file in the page cache, and a rate that no link carries, are each a sentence; an honest result has none (C145)."""
    honest = [some_row("read", "uring", 1 << 20, 32, 7e9)]
    assert cache_notes(honest, 0.0, 1) == []
    (cached,) = cache_notes(honest, 0.5, 1)
    assert "50% of the file was in the page cache" in cached
    (fast,) = cache_notes([some_row("read", "uring", 1 << 20, 32, 40e9)], 0.0, 2)
    assert "40.0 GB/s" in fast
    assert cache_notes([some_row("read", "uring", 1 << 20, 32, 30e9)], 0.0, 2) == []


def test_a_disk_that_slows_down_is_said_to() -> None:
    """Both rates and the bytes until then are in the sentence; a steady disk is said to be steady."""
    slow = slowdown_note(LongRun("uring", 1 << 20, 32, 1.0, (3e9,) * 6 + (0.5e9,) * 6, 21 << 30))
    assert "3.00 GB/s at first, 0.50 after 21.00 GiB" in slow
    steady = slowdown_note(LongRun("uring", 1 << 20, 32, 1.0, (3e9, 2.9e9, 3.1e9), 9 << 30))
    assert "stayed at 3.10 GB/s over 9.00 GiB" in steady
