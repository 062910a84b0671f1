"""Tiles of optimizer state: in RAM for good, or in a swap file and leased a slot while somebody works on them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from enum import Enum

from infinity.errors import IllegalTransition, InfinityError, StorageError
from infinity.handles import Handle, Ready
from infinity.memory.arena import Buffer
from infinity.memory.pool import BufferPool, Lease
from infinity.states import Lifecycle
from infinity.store.swapped import SwappedBytes


class TileState(Enum):
    """Where the valid bytes of a swapped tile are."""

    EMPTY = "empty"  # nowhere: it was never filled
    RESIDENT = "resident"  # in a leased slot; somebody works on them
    WRITING = "writing"  # in a slot in flight; after a failed write the tile stays here
    STORED = "stored"  # on disk
    READING = "reading"  # on disk, and on their way into a slot


TILE_MOVES = {
    TileState.EMPTY: (TileState.RESIDENT,),
    TileState.RESIDENT: (TileState.WRITING, TileState.STORED, TileState.EMPTY),  # the last two: released, not published
    TileState.WRITING: (TileState.STORED,),
    TileState.STORED: (TileState.READING, TileState.RESIDENT),
    TileState.READING: (TileState.RESIDENT, TileState.STORED),
}


class TileLease:
    """The right to read and change a tile's bytes until it is published or released."""

    __slots__ = ("_give_back", "buffer")

    def __init__(self, buffer: Buffer, give_back: Callable[[TileLease], None]) -> None:
        self.buffer = buffer
        self._give_back = give_back

    def release(self) -> None:
        """Give the slot back without writing: what is on disk stays valid. A resident tile keeps its bytes."""
        self._give_back(self)


class ResidentTile:
    """A tile that stays in RAM: no I/O, no slot, always RESIDENT."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def fetch(self) -> Handle[TileLease]:
        return Ready(TileLease(self.buffer, _stays))

    def new(self) -> TileLease:
        _fill_with_zeros(self.buffer)
        return TileLease(self.buffer, _stays)

    def publish(self, lease: TileLease) -> Handle[None]:
        return Ready(None)


class SwappedTile:
    """A tile in a swap file. Safe to use from any thread; one lease at a time."""

    def __init__(self, content: SwappedBytes, pool: BufferPool, name: str) -> None:
        self.content = content
        self._pool = pool
        self._lock = threading.Lock()
        self._lifecycle = Lifecycle(name, TileState.STORED if content.written else TileState.EMPTY, TILE_MOVES)
        self._slot: Lease | None = None  # while READING or RESIDENT
        self._lease: TileLease | None = None  # while RESIDENT

    @property
    def state(self) -> TileState:
        return self._lifecycle.state

    def fetch(self) -> Handle[TileLease]:
        """Lease a slot and read. Waits for the tile's write in flight, and for a slot when none is free."""
        with self._lock:
            self._settle()
            self._lifecycle.to(TileState.READING)
            slot = None
            try:
                slot = self._pool.lease()
                read = self.content.read(slot.buffer)
            except InfinityError:
                if slot is not None:
                    slot.release()
                self._back()
                raise
            self._slot = slot
            return _Fetch(self, slot, read)

    def new(self) -> TileLease:
        """Lease a slot full of zeros, to be filled and published."""
        with self._lock:
            self._settle()
            self._lifecycle.to(TileState.RESIDENT)
            try:
                slot = self._pool.lease()
            except InfinityError:
                self._back()
                raise
            lease = self._leased(slot)
        _fill_with_zeros(lease.buffer)
        return lease

    def publish(self, lease: TileLease) -> Handle[None]:
        """Write the bytes of the current lease; its slot frees itself when they are written.

        When the write cannot even be submitted the lease stays with the caller.
        """
        with self._lock:
            slot = self._require_current(lease)
            write = self.content.write(lease.buffer)
            self._lifecycle.to(TileState.WRITING)
            self._slot = self._lease = None
            slot.release_after(write)
            return write

    def arrived(self, slot: Lease) -> TileLease:
        """The read into `slot` has ended well (called by the fetch's handle)."""
        with self._lock:
            self._lifecycle.to(TileState.RESIDENT)
            return self._leased(slot)

    def lost(self, slot: Lease) -> None:
        """The read into `slot` has failed; what is on disk may still be good (called by the fetch's handle)."""
        with self._lock:
            self._slot = None
            slot.release()
            self._back()

    def require_published(self) -> None:
        """Raise IllegalTransition while the disk does not have, or is not getting, the tile's bytes."""
        with self._lock:
            if self.state not in (TileState.STORED, TileState.WRITING):
                raise IllegalTransition(f"{self._lifecycle.name} is {self.state.name}; it must be published first.")

    def abandon(self) -> None:
        """Wait for I/O and take the slot back from whoever has it, for `Store.close`."""
        self.content.finish()
        with self._lock:
            if self._slot is not None:
                self._slot.release()
            self._slot = self._lease = None

    def _leased(self, slot: Lease) -> TileLease:
        buffer = slot.buffer.part(0, self.content.extent.num_bytes)
        self._slot, self._lease = slot, TileLease(buffer, self._released)
        return self._lease

    def _released(self, lease: TileLease) -> None:
        with self._lock:
            self._require_current(lease).release()
            self._slot = self._lease = None
            self._back()

    def _back(self) -> None:
        self._lifecycle.to(TileState.STORED if self.content.written else TileState.EMPTY)

    def _require_current(self, lease: TileLease) -> Lease:
        if self._slot is None or self._lease is not lease:
            raise IllegalTransition(f"{self._lifecycle.name} is {self.state.name}: this lease of it is over.")
        return self._slot

    def _settle(self) -> None:
        if self.state is TileState.WRITING:
            self.content.settle()
            self._lifecycle.to(TileState.STORED)


class _Fetch:
    """The handle of a tile's read; its result is the lease. Waiting twice gives the same result or error."""

    def __init__(self, tile: SwappedTile, slot: Lease, read: Handle[None]) -> None:
        self._tile = tile
        self._slot = slot
        self._read = read
        self._lock = threading.Lock()
        self._lease: TileLease | None = None
        self._error: StorageError | None = None

    def wait(self) -> TileLease:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._lease is None:
                try:
                    self._read.wait()
                except StorageError as error:
                    self._error = error
                    self._tile.lost(self._slot)
                    raise
                self._lease = self._tile.arrived(self._slot)
            return self._lease

    def done(self) -> bool:
        return self._read.done()


def _stays(lease: TileLease) -> None:
    """A resident tile is nobody's to give back."""


def _fill_with_zeros(buffer: Buffer) -> None:
    # Padding belongs to no segment, so nobody else writes it; a slot still holds another tile's bytes there.
    ctypes.memset(buffer.address, 0, buffer.num_bytes)
