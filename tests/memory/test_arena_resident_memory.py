"""What an arena costs once every byte of it was touched: what was asked for, in whole pages, huge ones where they fit."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path

import pytest
import torch
from test_arena import FakeCuda, arena_of

from infinity.byte_sizes import MIB, PAGE_BYTES, round_up
from infinity.memory.arena import Arena
from infinity.memory.ledger import Ledger
from infinity.memory.limits import rss_bytes
from infinity.memory.pinning import HostPinner
from infinity.memory.pool import open_pool
from infinity.states import Tier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked in Linux's way")

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZES = [
    1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 4097, 33 * MIB + 1, 65 * MIB - 12345,
    129 * MIB + 3 * PAGE_BYTES, 300 * MIB - 5,
]  # fmt: skip


def resident_bytes(address: int, num_bytes: int) -> int:
    """Return how much of a range of whole pages has memory behind it, page by page (pagemap of proc(5))."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // PAGE_BYTES * 8)
        pages = struct.unpack(f"{num_bytes // PAGE_BYTES}Q", file.read(num_bytes // PAGE_BYTES * 8))
    return sum(page >> 62 != 0 for page in pages) * PAGE_BYTES  # present, or swapped out


def mapping_of(arena: Arena) -> tuple[int, int]:
    """Return address and length of all that the arena has mapped, its slack included."""
    return ctypes.addressof(ctypes.c_char.from_buffer(arena._mapping)), len(arena._mapping)


def flags_at(address: int) -> set[str]:
    """Return the kernel's flags of the mapping at an address (VmFlags of proc(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    return set()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_touched_arenas_take_what_was_asked_for(num_bytes: int) -> None:
    """C36: no rounding to powers of two or huge pages: a filled arena holds its own pages, and its slack holds none."""
    with arena_of(num_bytes) as arena:
        arena.buffer.tensor(torch.uint8, arena.num_bytes).fill_(1)
        assert resident_bytes(arena.buffer.address, arena.num_bytes) == round_up(num_bytes, PAGE_BYTES)
        assert resident_bytes(*mapping_of(arena)) <= max(1.01 * num_bytes, round_up(num_bytes, PAGE_BYTES))


def test_the_process_grows_by_what_was_asked_for() -> None:
    """The resident set grows by an arena of 150 MiB and a bit to within 1 %, and shrinks by it when it is closed."""
    num_bytes = 150 * MIB + 3 * PAGE_BYTES + 7
    before = rss_bytes()
    with arena_of(num_bytes) as arena:
        arena.buffer.tensor(torch.uint8, arena.num_bytes).fill_(1)
        assert abs(rss_bytes() - before - num_bytes) < 0.01 * num_bytes
    assert abs(rss_bytes() - before) < 0.01 * num_bytes


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here")
@pytest.mark.parametrize(("num_bytes", "huge"), [(MIB, False), (2 * MIB, True), (7 * MIB + 1, True)])
def test_huge_pages_where_they_fit(num_bytes: int, huge: bool) -> None:
    """From 2 MiB on the kernel is asked for huge pages, for whole ones only: not for an arena's last part."""
    with arena_of(num_bytes) as arena:
        address = arena.buffer.address
        assert ("hg" in flags_at(address)) is huge
        if huge:
            assert ("hg" in flags_at(address + num_bytes // (2 * MIB) * 2 * MIB)) is False


def test_a_pool_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """C36: a pool beyond what can be page-locked is pageable and works; the one line blames host memory, not the GPU's."""
    cuda = FakeCuda(limit_bytes=4 * MIB)
    sizes = {"slot_bytes": MIB, "num_slots": 3, "pin": True, "pinner": HostPinner(cuda)}
    pools = [open_pool(ledger=Ledger({}), tier=Tier.CPU, owner="test", **sizes) for _ in range(3)]
    for pool in pools:
        lease = pool.lease()
        lease.buffer.tensor(torch.uint8, MIB).fill_(1)
        lease.release()
        pool.close()
    [record] = caplog.records
    assert "host memory" in record.message
    assert "pageable" in record.message
    assert "GPU memory" not in record.message
    assert cuda.registered == {}
