"""The buffer pool: leases, waiting, errors of handles, closing."""

import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.byte_sizes import PAGE_BYTES
from infinity.errors import IllegalTransition, OverBudget, StorageError
from infinity.handles import Promise, Ready
from infinity.memory.ledger import Ledger
from infinity.memory.pool import LEASE_MOVES, POOL_MOVES, BufferPool, LeaseState, PoolState, open_pool
from infinity.states import Lifecycle, Tier


def pool_of(num_slots: int, ledger: Ledger | None = None, slot_bytes: int = PAGE_BYTES) -> BufferPool:
    """Open an unpinned pool on the CPU tier."""
    return open_pool(
        slot_bytes=slot_bytes, num_slots=num_slots, ledger=ledger or Ledger({}), tier=Tier.CPU, owner="tiles", pin=False
    )


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Run `work` in a thread and collect what it returned or raised."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(work())
        except (StorageError, IllegalTransition) as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_slots_are_disjoint_and_whole_pages() -> None:
    """C2: a slot is rounded up to whole pages by the pool itself, and no two slots overlap."""
    ledger = Ledger({})
    pool = pool_of(3, ledger, slot_bytes=PAGE_BYTES + 1)
    leases = [pool.lease() for _ in range(3)]
    assert pool.slot_bytes == 2 * PAGE_BYTES
    assert ledger.used(Tier.CPU) == 6 * PAGE_BYTES
    for number, lease in enumerate(leases):
        assert lease.buffer.address % PAGE_BYTES == 0
        lease.buffer.tensor(torch.uint8, lease.buffer.num_bytes).fill_(number + 1)
    for number, lease in enumerate(leases):
        assert lease.buffer.tensor(torch.uint8, lease.buffer.num_bytes).eq(number + 1).all()
        lease.release()
    pool.close()
    assert ledger.used(Tier.CPU) == 0


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=4), st.lists(st.integers(min_value=0, max_value=5), max_size=60))
def test_every_slot_has_at_most_one_holder(num_slots: int, choices: list[int]) -> None:
    """Whatever the order of leases, releases and handles, no slot is leased twice and none is lost."""
    ledger = Ledger({})
    pool = pool_of(num_slots, ledger)
    leased: list = []
    flying: list = []
    for choice in choices:
        if choice <= 1 and len(leased) + sum(not promise.done() for promise in flying) < num_slots:
            lease = pool.lease()
            assert lease.slot not in {other.slot for other in leased}
            leased.append(lease)
            flying = [promise for promise in flying if not promise.done()]
        elif choice in {2, 3} and leased:
            leased.pop(choice % len(leased)).release()
        elif choice == 4 and leased:
            flying.append(Promise())
            leased.pop(0).release_after(flying[-1])
        elif choice == 5 and flying:
            flying[-1].resolve(None)
        busy = len(leased) + sum(not promise.done() for promise in flying)
        assert pool.num_free == num_slots - busy
    for promise in flying:
        promise.resolve(None)
    for lease in leased:
        lease.release()
    pool.close()
    assert ledger.used(Tier.CPU) == 0


def test_a_second_release_is_refused_whoever_has_the_slot_now() -> None:
    """A lease is used once: releasing it again fails, also when its slot belongs to somebody else, who is not disturbed."""
    pool = pool_of(1)
    first = pool.lease()
    first.release()
    with pytest.raises(IllegalTransition, match=r"slot 0 of tiles.*FREE cannot become FREE"):
        first.release()
    second = pool.lease()
    with pytest.raises(IllegalTransition):
        first.release()
    with pytest.raises(IllegalTransition):
        first.release_after(Ready(None))
    with pytest.raises(IllegalTransition, match="is over"):
        _ = first.buffer
    assert pool.num_free == 0
    assert second.buffer.num_bytes == PAGE_BYTES


def test_a_lease_in_flight_is_released_by_its_handle_only() -> None:
    """Between `release_after` and the end of the handle neither kind of release is legal; the buffer can still be read."""
    pool = pool_of(1)
    lease = pool.lease()
    written: Promise[None] = Promise()
    lease.release_after(written)
    with pytest.raises(IllegalTransition, match="by its handle"):
        lease.release()
    with pytest.raises(IllegalTransition, match="IN_FLIGHT cannot become IN_FLIGHT"):
        lease.release_after(written)
    assert lease.buffer.num_bytes == PAGE_BYTES
    assert pool.num_free == 0
    written.resolve(None)
    assert pool.num_free == 1


def test_a_done_handle_is_preferred_to_the_oldest() -> None:
    """With nothing free, a slot whose I/O has ended is taken before one that must be waited for."""
    pool = pool_of(2)
    old, new = pool.lease(), pool.lease()
    slow: Promise[None] = Promise()
    old.release_after(slow)
    new.release_after(Ready(None))
    assert pool.lease().slot == new.slot
    slow.resolve(None)


def test_lease_waits_for_the_oldest_in_flight() -> None:
    """C8: with nothing free and nothing done a lease is granted when the oldest I/O ends."""
    pool = pool_of(2)
    handles: list[Promise[None]] = [Promise(), Promise()]
    slots = []
    for handle in handles:
        lease = pool.lease()
        slots.append(lease.slot)
        lease.release_after(handle)
    thread, outcome = in_thread(lambda: pool.lease().slot)
    thread.join(0.05)
    assert outcome == []
    handles[0].resolve(None)
    thread.join(10)
    assert outcome == [slots[0]]


def test_lease_blocks_until_another_thread_releases() -> None:
    """C8: with nothing free and nothing in flight a lease waits for a release, and for a release by handle as well."""
    for give_back in (lambda lease: lease.release(), lambda lease: lease.release_after(Ready(None))):
        pool = pool_of(1)
        lease = pool.lease()
        thread, outcome = in_thread(lambda pool=pool: pool.lease().slot)
        thread.join(0.05)
        assert outcome == []
        give_back(lease)
        thread.join(10)
        assert outcome == [0]


def test_many_threads_share_few_slots() -> None:
    """C8: any number of slots serves any number of threads; each finds its own bytes as it left them."""
    pool = pool_of(2)
    spoiled: list[int] = []

    def work(number: int) -> None:
        for turn in range(30):
            lease = pool.lease()
            tensor = lease.buffer.tensor(torch.uint8, 256)
            tensor.fill_(number)
            if not tensor.eq(number).all():
                spoiled.append(number)
            if turn % 2:
                lease.release_after(Ready(None))
            else:
                lease.release()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert spoiled == []
    pool.close()


def test_a_failed_handle_is_raised_by_the_next_lease_and_frees_the_slot() -> None:
    """C3: a write that failed is not lost with its slot: whoever needs the slot gets the error, and the slot is usable."""
    pool = pool_of(1)
    written: Promise[None] = Promise()
    pool.lease().release_after(written)
    written.fail(StorageError("write failed at offset 4096", errno=5))
    with pytest.raises(StorageError, match="offset 4096"):
        pool.lease()
    pool.lease().release()
    pool.close()


def test_close_with_leases_out_is_refused() -> None:
    """Closing a pool whose memory is in use names how many slots are out and changes nothing."""
    ledger = Ledger({})
    pool = pool_of(2, ledger)
    lease = pool.lease()
    pool.lease().release()
    with pytest.raises(IllegalTransition, match="1 of 2 slots"):
        pool.close()
    assert ledger.used(Tier.CPU) == 2 * PAGE_BYTES
    lease.release()
    pool.close()
    pool.close()
    assert ledger.used(Tier.CPU) == 0
    with pytest.raises(IllegalTransition, match="closed"):
        pool.lease()


def test_close_waits_for_io_and_raises_its_error_after_the_memory_is_back() -> None:
    """I/O on the memory ends before the memory goes; its failure is raised all the same."""
    ledger = Ledger({})
    pool = pool_of(2, ledger)
    slow: Promise[None] = Promise()
    failed: Promise[None] = Promise()
    failed.fail(StorageError("disk full", errno=28))
    first, second = pool.lease(), pool.lease()
    first.release_after(failed)
    second.release_after(slow)
    thread, outcome = in_thread(pool.close)
    thread.join(0.05)
    assert outcome == []
    assert ledger.used(Tier.CPU) == 2 * PAGE_BYTES
    slow.resolve(None)
    thread.join(10)
    assert str(outcome[0]) == "disk full"
    assert ledger.used(Tier.CPU) == 0


def test_a_pool_beyond_the_budget_is_refused_whole() -> None:
    """The ledger is asked for all slots at once."""
    ledger = Ledger({Tier.CPU: 3 * PAGE_BYTES})
    with pytest.raises(OverBudget, match="tiles asks for"):
        pool_of(4, ledger)
    assert ledger.peak(Tier.CPU) == 0


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(0, 1), (1, 0)])
def test_a_pool_without_slots_or_bytes_is_refused(slot_bytes: int, num_slots: int) -> None:
    """A pool on which every lease would block for ever is never made."""
    with pytest.raises(IllegalTransition, match="at least 1"):
        pool_of(num_slots, slot_bytes=slot_bytes)


@pytest.mark.parametrize(
    ("moves", "states"), [(LEASE_MOVES, tuple(LeaseState)), (POOL_MOVES, tuple(PoolState))], ids=["lease", "pool"]
)
def test_every_move_outside_the_table_is_refused(moves: dict, states: tuple) -> None:
    """For every pair of states the table decides, and an illegal move names both."""
    for current, target in product(states, states):
        lifecycle = Lifecycle("thing", current, moves)
        if target in moves[current]:
            lifecycle.to(target)
            assert lifecycle.state is target
        else:
            with pytest.raises(IllegalTransition, match=f"{current.name} cannot become {target.name}"):
                lifecycle.to(target)
