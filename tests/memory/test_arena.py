"""Arenas and buffers: exact size, alignment, shared memory, and what close does."""

import gc
import mmap
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from infinity.byte_sizes import MIB, PAGE_BYTES
from infinity.errors import IllegalTransition, OverBudget
from infinity.memory.arena import Arena, Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.limits import rss_bytes
from infinity.memory.pinning import HostPinner
from infinity.states import Tier


class FakeCuda:
    """A CUDA runtime that refuses every registration beyond `limit_bytes` and checks that each is undone once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}
        self.num_errors_forgotten = 0

    def host_register(self, address: int, num_bytes: int) -> int:
        if sum(self.registered.values()) + num_bytes > self.limit_bytes:
            return 2
        self.registered[address] = num_bytes
        return 0

    def forget_error(self) -> None:
        self.num_errors_forgotten += 1

    def host_unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def arena_of(num_bytes: int, ledger: Ledger | None = None, **more: object) -> Arena:
    """Open an arena on the CPU tier, unpinned unless said otherwise."""
    return open_arena(num_bytes, ledger=ledger or Ledger({}), tier=Tier.CPU, owner="test", **{"pin": False, **more})


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 4000])
def test_size_and_alignment_are_exact(num_bytes: int) -> None:
    """Whole pages are booked, no more; the address is page aligned, and 2 MiB aligned from 2 MiB on; contents are zeros."""
    ledger = Ledger({})
    with arena_of(num_bytes, ledger) as arena:
        assert arena.num_bytes == arena.buffer.num_bytes == ledger.used(Tier.CPU)
        assert arena.num_bytes - num_bytes < PAGE_BYTES or num_bytes == 0
        assert arena.num_bytes % PAGE_BYTES == 0
        assert arena.buffer.address % (2 * MIB if num_bytes >= 2 * MIB else PAGE_BYTES) == 0
        assert not arena.buffer.tensor(torch.uint8, arena.num_bytes).any()
    assert ledger.used(Tier.CPU) == 0


def test_huge_pages_cost_no_memory_beyond_the_arena() -> None:
    """Arenas of three huge pages and a bit, filled, hold no more resident memory than was booked."""
    before = rss_bytes()
    arenas = [arena_of(6 * MIB + PAGE_BYTES) for _ in range(8)]
    for arena in arenas:
        arena.buffer.tensor(torch.uint8, arena.num_bytes).fill_(1)
    grown = rss_bytes() - before
    booked = sum(arena.num_bytes for arena in arenas)
    for arena in arenas:
        arena.close()
    assert 0.9 * booked <= grown <= booked + MIB


def test_close_returns_memory_at_once_even_when_tensors_live() -> None:
    """The resident set falls with close; a tensor that outlives the arena reads zeros and may be written."""
    ledger = Ledger({})
    arena = arena_of(64 * MIB, ledger)
    tensor = arena.buffer.tensor(torch.float32, 16 * MIB)
    tensor.fill_(3)
    full = rss_bytes()
    arena.close()
    assert full - rss_bytes() > 60 * MIB
    assert ledger.used(Tier.CPU) == 0
    assert tensor[::4096].eq(0).all()
    view = tensor[5:8]
    del tensor
    view.fill_(2)
    assert view.tolist() == [2, 2, 2]


def test_closing_twice_gives_back_once() -> None:
    """A second close does nothing, and a closed arena hands out no buffer."""
    ledger = Ledger({})
    ledger.take(Tier.CPU, "test", 7)
    arena = arena_of(PAGE_BYTES, ledger)
    arena.close()
    arena.close()
    assert ledger.used(Tier.CPU) == 7
    with pytest.raises(IllegalTransition, match="test is closed"):
        _ = arena.buffer


def test_tensors_keep_the_memory_mapped() -> None:
    """The mapping goes with its last user: arena and buffers may be dropped before the tensor, never the other way."""
    arena = arena_of(4 * MIB)
    mapping = weakref.ref(arena._mapping)
    tensor = arena.buffer.part(PAGE_BYTES, MIB).tensor(torch.int64, 4)
    tensor.copy_(torch.arange(4))
    del arena
    gc.collect()
    assert isinstance(mapping(), mmap.mmap)
    assert tensor.tolist() == [0, 1, 2, 3]
    del tensor
    gc.collect()
    assert mapping() is None


def test_parts_and_tensors_share_the_bytes() -> None:
    """A part of a part at a byte offset and a tensor over the whole see the same memory at the right place."""
    with arena_of(3 * PAGE_BYTES) as arena:
        whole = arena.buffer.tensor(torch.uint8, arena.num_bytes)
        part = arena.buffer.part(PAGE_BYTES, 2 * PAGE_BYTES).part(64, 128)
        assert part.address == arena.buffer.address + PAGE_BYTES + 64
        part.tensor(torch.bfloat16, 3, byte_offset=8).copy_(torch.tensor([1.0, 2.0, -3.0]))
        assert part.tensor(torch.bfloat16, 3, byte_offset=8).data_ptr() == part.address + 8
        expected = torch.tensor([1.0, 2.0, -3.0], dtype=torch.bfloat16).view(torch.uint8)
        assert torch.equal(whole[PAGE_BYTES + 72 : PAGE_BYTES + 78], expected)
        assert whole.count_nonzero() == expected.count_nonzero()
        assert part.tensor(torch.float32, 0, byte_offset=128).numel() == 0


@pytest.mark.parametrize(
    "reach",
    [
        lambda buffer: buffer.part(0, buffer.num_bytes + 1),
        lambda buffer: buffer.part(-1, 1),
        lambda buffer: buffer.part(1, -1),
        lambda buffer: buffer.part(64, 64).part(0, 65),
        lambda buffer: buffer.tensor(torch.float32, buffer.num_bytes // 4 + 1),
        lambda buffer: buffer.part(64, 64).tensor(torch.float32, 16, byte_offset=4),
    ],
)
def test_reaching_outside_a_buffer_is_refused(reach: object) -> None:
    """No part and no tensor leaves its buffer, although the arena around it is larger."""
    with arena_of(PAGE_BYTES) as arena, pytest.raises(IllegalTransition, match="not inside"):
        reach(arena.buffer)  # type: ignore[operator]


def test_the_ledger_is_asked_first() -> None:
    """An arena beyond the budget is refused before anything is mapped."""
    ledger = Ledger({Tier.CPU: 2 * PAGE_BYTES})
    with pytest.raises(OverBudget, match="test asks for"):
        arena_of(2 * PAGE_BYTES + 1, ledger)
    assert ledger.peak(Tier.CPU) == 0


def test_a_refusal_of_the_system_gives_the_booking_back() -> None:
    """Where the system maps no more (ulimit -v) the error is OverBudget in its words, and nothing stays booked."""
    script = """
import resource
from infinity.errors import OverBudget
from infinity.memory.arena import open_arena
from infinity.memory.ledger import Ledger
from infinity.states import Tier
ledger = Ledger({})
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    open_arena(1 << 40, ledger=ledger, tier=Tier.CPU, owner="moments", pin=False)
except OverBudget as error:
    print(ledger.used(Tier.CPU), error)
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.startswith("0 cpu memory: the system refuses moments 1.00 TiB")
    assert "Cannot allocate memory" in result.stdout


def test_pinned_arenas_register_exactly_their_memory() -> None:
    """Page-locking covers the arena from its address on, and ends before the memory goes."""
    cuda = FakeCuda(limit_bytes=10 * MIB)
    arena = arena_of(3 * MIB + 1, pin=True, pinner=HostPinner(cuda))
    assert arena.pinned
    assert cuda.registered == {arena.buffer.address: arena.num_bytes}
    arena.close()
    assert cuda.registered == {}


def test_refused_pinning_falls_back_to_pageable_memory_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    """C36: when page-locking fails after some MiB, arenas stay pageable and work; one line says so, however many fail."""
    cuda = FakeCuda(limit_bytes=4 * MIB)
    pinner = HostPinner(cuda)
    arenas = [arena_of(3 * MIB, pin=True, pinner=pinner) for _ in range(3)]
    assert [arena.pinned for arena in arenas] == [True, False, False]
    assert len(caplog.records) == 1
    assert "3.00 MiB" in pinner.note
    assert cuda.num_errors_forgotten == 2
    assert "pageable" in caplog.text
    for arena in arenas:
        arena.buffer.tensor(torch.uint8, 5).fill_(1)
        arena.close()
    assert cuda.registered == {}


def test_pinning_without_cuda_does_nothing() -> None:
    """On a machine without a CUDA device `pin=True` is an ordinary arena and no note."""
    pinner = HostPinner(None)
    with arena_of(PAGE_BYTES, pin=True, pinner=pinner) as arena:
        assert not arena.pinned
        assert isinstance(arena.buffer, Buffer)
    assert pinner.note == ""
