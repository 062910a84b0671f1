"""Arenas: anonymous host memory of an exact, page-rounded size, on huge pages where that costs no extra memory.

[Note: huge pages] The mapping is one huge page longer than asked, so that the arena can start on a 2 MiB boundary; address
space that nobody touches costs no memory. Only the arena's whole huge pages are advised to be huge: the rest of it would
otherwise fault in a huge page of which a part was never asked for and never booked.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from enum import Enum

import torch

from infinity.byte_sizes import MIB, PAGE_BYTES, format_bytes, round_up
from infinity.errors import IllegalTransition, OverBudget
from infinity.memory.ledger import Ledger
from infinity.memory.pinning import HostPinner, host_pinner
from infinity.states import Lifecycle, Tier

_HUGE_PAGE_BYTES = 2 * MIB


class Buffer:
    """A range of an arena's memory. It, its parts and its tensors keep the memory mapped."""

    __slots__ = ("_memory", "_offset", "address", "num_bytes")

    def __init__(self, memory: ctypes.Array[ctypes.c_char], offset: int, num_bytes: int) -> None:
        self._memory = memory
        self._offset = offset
        self.address = ctypes.addressof(memory) + offset
        self.num_bytes = num_bytes

    def tensor(self, dtype: torch.dtype, numel: int, byte_offset: int = 0) -> torch.Tensor:
        """Return a 1D tensor of `numel` elements over the bytes from `byte_offset`; it shares the memory.

        Raises IllegalTransition when it would reach outside the buffer.
        """
        self._require_inside(byte_offset, numel * dtype.itemsize)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._offset + byte_offset)

    def part(self, byte_offset: int, num_bytes: int) -> Buffer:
        """Return the range of `num_bytes` from `byte_offset`. Raises IllegalTransition when it would reach outside."""
        self._require_inside(byte_offset, num_bytes)
        return Buffer(self._memory, self._offset + byte_offset, num_bytes)

    def _require_inside(self, byte_offset: int, num_bytes: int) -> None:
        if byte_offset < 0 or num_bytes < 0 or byte_offset + num_bytes > self.num_bytes:
            raise IllegalTransition(
                f"Buffer: {num_bytes} bytes from offset {byte_offset} are not inside a buffer of {self.num_bytes} bytes."
            )


class ArenaState(Enum):
    """OPEN: mapped and booked. CLOSED: given back to the system and the ledger."""

    OPEN = "open"
    CLOSED = "closed"


_MOVES = {ArenaState.OPEN: (ArenaState.CLOSED,), ArenaState.CLOSED: ()}


class Arena:
    """Memory with one owner, booked in the ledger from `open_arena` to `close`. It starts out as zeros.

    Not thread-safe: whoever opened it closes it, when no I/O and no copy uses it any more.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        start: int,
        num_bytes: int,
        ledger: Ledger,
        tier: Tier,
        owner: str,
        pinner: HostPinner | None,
    ) -> None:
        self.num_bytes = num_bytes  # whole pages: what the ledger was asked for
        self.pinned = pinner is not None
        self._mapping = mapping
        self._start = start
        self._ledger = ledger
        self._tier = tier
        self._owner = owner
        self._pinner = pinner
        self._buffer: Buffer | None = Buffer((ctypes.c_char * num_bytes).from_buffer(mapping, start), 0, num_bytes)
        self._lifecycle = Lifecycle(f"Arena of {owner}", ArenaState.OPEN, _MOVES)

    @property
    def buffer(self) -> Buffer:
        """The whole arena. Raises IllegalTransition once it is closed."""
        if self._buffer is None:
            raise IllegalTransition(f"Arena of {self._owner} is closed.")
        return self._buffer

    def close(self) -> None:
        """Return the memory to the system and to the ledger at once; closing again does nothing.

        Buffers and tensors that still exist stay safe to touch: they read zeros from now on, what they write is booked
        nowhere, and the last one to go unmaps the address range.
        """
        if self._lifecycle.state is ArenaState.CLOSED:
            return
        self._lifecycle.to(ArenaState.CLOSED)
        if self._pinner is not None:
            self._pinner.unpin(self.buffer.address)
        self._buffer = None
        try:
            self._mapping.close()
        except BufferError:  # a buffer or tensor still uses the mapping
            self._mapping.madvise(mmap.MADV_DONTNEED)
        self._ledger.give(self._tier, self._owner, self.num_bytes)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_arena(
    num_bytes: int, *, ledger: Ledger, tier: Tier, owner: str, pin: bool, pinner: HostPinner | None = None
) -> Arena:
    """Book and map `num_bytes`, rounded up to whole pages.

    The address is a multiple of the page, and of 2 MiB when the arena is at least that large. `pin` page-locks it where
    there is a CUDA device (`Arena.pinned` says whether that worked); `pinner` is the process's own unless given.
    Raises OverBudget when the ledger or the system refuses.
    """
    exact_bytes = round_up(max(num_bytes, 1), PAGE_BYTES)
    ledger.take(tier, owner, exact_bytes)
    try:
        mapping, start = _map(exact_bytes)
    except OSError as error:
        ledger.give(tier, owner, exact_bytes)
        raise OverBudget(
            f"{tier.value} memory: the system refuses {owner} {format_bytes(exact_bytes)} ({exact_bytes} bytes): {error}.",
            remedy="Raise the limit on address space (ulimit -v) or lower the memory budget.",
        ) from error
    chosen = (pinner or host_pinner()) if pin else None
    pinned = chosen is not None and chosen.pin(_address(mapping) + start, exact_bytes)
    return Arena(mapping, start, exact_bytes, ledger=ledger, tier=tier, owner=owner, pinner=chosen if pinned else None)


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Map `num_bytes` and return the mapping and where in it they start. See [Note: huge pages]."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if num_bytes < _HUGE_PAGE_BYTES:
        return mmap.mmap(-1, num_bytes, flags=flags), 0
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=flags)
    start = -_address(mapping) % _HUGE_PAGE_BYTES
    huge_bytes = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    with suppress(OSError):  # a kernel without transparent huge pages: the advice is a matter of speed only
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_bytes)
    return mapping, start


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
