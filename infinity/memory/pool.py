"""A pool of equal buffers that are leased one at a time and come back by themselves when the I/O on them has ended."""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.errors import IllegalTransition
from infinity.handles import AllOf, Handle
from infinity.memory.arena import Arena, Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.pinning import HostPinner
from infinity.states import Lifecycle, Tier


class PoolState(Enum):
    """OPEN: grants leases. CLOSED: its memory is given back, or will be when the last I/O on it ends."""

    OPEN = "open"
    CLOSED = "closed"


POOL_MOVES = {PoolState.OPEN: (PoolState.CLOSED,), PoolState.CLOSED: ()}


class LeaseState(Enum):
    """FREE: the slot is the pool's. LEASED: the lessee may read and write. IN_FLIGHT: a handle decides when it is free."""

    FREE = "free"
    LEASED = "leased"
    IN_FLIGHT = "in flight"


LEASE_MOVES = {
    LeaseState.FREE: (LeaseState.LEASED,),
    LeaseState.LEASED: (LeaseState.IN_FLIGHT, LeaseState.FREE),
    LeaseState.IN_FLIGHT: (LeaseState.FREE,),
}


class Lease:
    """The right to use one slot, from `BufferPool.lease` until `release` or until the handle of `release_after` is done.

    A lease is used once: the next lessee of the slot gets a new one, so that a second release is always noticed.
    """

    __slots__ = ("_buffer", "_pool", "lifecycle", "slot")

    def __init__(self, pool: BufferPool, slot: int, buffer: Buffer) -> None:
        self.slot = slot
        self._pool = pool
        self._buffer = buffer
        self.lifecycle = Lifecycle(f"Lease of slot {slot} of {pool.owner}", LeaseState.FREE, LEASE_MOVES)

    @property
    def buffer(self) -> Buffer:
        """The slot's memory. Raises IllegalTransition when the lease is over."""
        if self.lifecycle.state is LeaseState.FREE:
            raise IllegalTransition(f"{self.lifecycle.name} is over; its buffer may be in use elsewhere.")
        return self._buffer

    def release(self) -> None:
        """Give the slot back now. Raises IllegalTransition when that was done or promised before."""
        self._pool.take_back(self)

    def release_after(self, handle: Handle[object]) -> None:
        """Give the slot back when `handle` is done. Raises IllegalTransition when that was done or promised before."""
        self._pool.take_back_after(self, handle)


class BufferPool:
    """`num_slots` buffers of `slot_bytes` each, in one arena. Safe to use from any thread; its opener closes it.

    An error of a handle that a slot waits for frees the slot (nothing uses the buffer any more) and is raised by the call
    that finds it, `lease` or `close`: it is never lost, whether or not the handle has another waiter.
    """

    def __init__(self, arena: Arena, owner: str, slot_bytes: int, num_slots: int) -> None:
        self.owner = owner
        self.slot_bytes = slot_bytes  # whole pages
        self.num_slots = num_slots
        self._lifecycle = Lifecycle(f"Pool of {owner}", PoolState.OPEN, POOL_MOVES)
        self._arena = arena
        self._changed = threading.Condition()
        self._free = list(range(num_slots))
        self._in_flight: deque[tuple[Lease, Handle[object]]] = deque()  # oldest first

    def lease(self) -> Lease:
        """Return a lease of a free slot.

        With nothing free it takes the slot of a handle that is done, else waits for the oldest handle, else blocks until
        another thread releases one. Contents are whatever the last lessee left.
        """
        while True:
            with self._changed:
                if self._lifecycle.state is PoolState.CLOSED:
                    raise IllegalTransition(f"{self._lifecycle.name} is closed; it grants no lease.")
                if self._free:
                    return self._granted(self._free.pop())
                returning = self._next_in_flight()
                if returning is None:
                    self._changed.wait()
                    continue
            self._land(*returning)  # without the lock: others may lease and release meanwhile

    @property
    def num_free(self) -> int:
        """How many leases would be granted without waiting."""
        with self._changed:
            return len(self._free) + sum(handle.done() for _, handle in self._in_flight)

    @property
    def buffer(self) -> Buffer:
        """The memory of all slots: for those who must know where it is, not for its content."""
        return self._arena.buffer

    def close(self) -> None:
        """Wait for the slots in flight and return the memory. Raises IllegalTransition while leases are out.

        An error of a handle is raised when the memory has been returned. Closing again does nothing.
        """
        with self._changed:
            if self._lifecycle.state is PoolState.CLOSED:
                return
            num_out = self.num_slots - len(self._free) - len(self._in_flight)
            if num_out:
                raise IllegalTransition(
                    f"Pool of {self.owner} is closed while {num_out} of {self.num_slots} slots are leased.",
                    remedy="Release every lease first.",
                )
            self._lifecycle.to(PoolState.CLOSED)
            handles = [handle for _, handle in self._in_flight]
            for lease, _ in self._in_flight:
                self._freed(lease)
            self._in_flight.clear()
        try:
            AllOf(handles).wait()
        finally:
            self._arena.close()

    def take_back(self, lease: Lease) -> None:
        """Make the slot of a leased lease free (`Lease.release`)."""
        with self._changed:
            if lease.lifecycle.state is LeaseState.IN_FLIGHT:
                raise IllegalTransition(f"Lease of slot {lease.slot} of {self.owner}: it is released by its handle.")
            self._freed(lease)

    def take_back_after(self, lease: Lease, handle: Handle[object]) -> None:
        """Put a leased lease in flight (`Lease.release_after`)."""
        with self._changed:
            lease.lifecycle.to(LeaseState.IN_FLIGHT)
            self._in_flight.append((lease, handle))
            self._changed.notify()

    def _granted(self, slot: int) -> Lease:
        lease = Lease(self, slot, self._arena.buffer.part(slot * self.slot_bytes, self.slot_bytes))
        lease.lifecycle.to(LeaseState.LEASED)
        return lease

    def _freed(self, lease: Lease) -> None:
        lease.lifecycle.to(LeaseState.FREE)
        self._free.append(lease.slot)
        self._changed.notify()

    def _next_in_flight(self) -> tuple[Lease, Handle[object]] | None:
        for position, (_, handle) in enumerate(self._in_flight):
            if handle.done():
                self._in_flight.rotate(-position)
                returning = self._in_flight.popleft()
                self._in_flight.rotate(position)
                return returning
        return self._in_flight.popleft() if self._in_flight else None

    def _land(self, lease: Lease, handle: Handle[object]) -> None:
        try:
            handle.wait()
        finally:
            with self._changed:
                self._freed(lease)


def open_pool(
    *,
    slot_bytes: int,
    num_slots: int,
    ledger: Ledger,
    tier: Tier,
    owner: str,
    pin: bool,
    pinner: HostPinner | None = None,
) -> BufferPool:
    """Book and map a pool of `num_slots` buffers of `slot_bytes`, rounded up to whole pages; see `open_arena`.

    Raises OverBudget when the ledger or the system refuses, IllegalTransition for a pool without slots or bytes.
    """
    if slot_bytes < 1 or num_slots < 1:
        raise IllegalTransition(f"Pool of {owner}: {num_slots} slots of {slot_bytes} bytes; both must be at least 1.")
    page_bytes = round_up(slot_bytes, PAGE_BYTES)
    arena = open_arena(page_bytes * num_slots, ledger=ledger, tier=tier, owner=owner, pin=pin, pinner=pinner)
    return BufferPool(arena, owner, page_bytes, num_slots)
