"""Work that a helper does beside: once, in order, by whoever comes first, and its error reaches everybody who waits."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import pytest

from infinity.errors import StorageError
from infinity.store.beside import Helper, SharedWork, open_helper


@pytest.fixture
def helper() -> Iterator[Helper]:
    opened = open_helper("test-helper")
    yield opened
    opened.close()


@pytest.fixture
def busy(helper: Helper) -> Iterator[threading.Event]:
    """Set it to let the helper go on."""
    going, may_end = threading.Event(), threading.Event()

    def work() -> None:
        going.set()
        may_end.wait()

    helper.give(work)
    going.wait()
    yield may_end
    may_end.set()


def test_work_is_done_in_order_and_nobody_has_to_wait_for_it(helper: Helper) -> None:
    """The thread takes what it was given, oldest first."""
    found: list[tuple[int, str]] = []
    given = [
        helper.give(lambda number=number: found.append((number, threading.current_thread().name))) for number in range(9)
    ]
    while not given[-1].done():
        pass
    assert found == [(number, "test-helper") for number in range(9)]


def test_a_waiter_does_what_the_busy_thread_has_not_begun(helper: Helper, busy: threading.Event) -> None:
    """One slow disk holds up nobody who waits for another; the thread does not do it again."""
    found: list[int] = []
    first, second = (helper.give(lambda: found.append(threading.get_ident())) for _ in range(2))
    assert not second.done()
    second.wait()
    assert (first.done(), second.done()) == (False, True)
    assert found == [threading.get_ident()]
    busy.set()
    helper.close()
    assert first.done()
    assert len(found) == 2


def test_work_is_not_done_before_its_end() -> None:
    """While one thread does it others see it as not done, and their waits last until it is."""
    going, may_end, ends = threading.Event(), threading.Event(), []

    def work() -> None:
        going.set()
        may_end.wait()
        ends.append(1)

    shared = SharedWork(work, threading.Condition())
    doing = threading.Thread(target=shared.wait)
    seen: list[list[int]] = []
    waiting = threading.Thread(target=lambda: (shared.wait(), seen.append(list(ends))))
    doing.start()
    going.wait()
    waiting.start()
    assert not shared.done()
    may_end.set()
    doing.join()
    waiting.join()
    assert shared.done()
    assert seen == [[1]]


def test_every_waiter_gets_the_error_and_the_thread_goes_on(helper: Helper) -> None:
    """Whatever the error is: done says that it is over, each wait raises it, what comes behind is done as ever."""
    for error in (StorageError("differs"), ZeroDivisionError("a bug")):

        def work(error: Exception = error) -> None:
            raise error

        failed, behind = helper.give(work), helper.give(lambda: None)
        while not behind.done():
            pass
        assert failed.done()
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                failed.wait()


def test_interrupted_work_is_done_again() -> None:
    """A KeyboardInterrupt belongs to the thread that it hits: the work is neither done nor failed."""
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    shared = SharedWork(work, threading.Condition())
    with pytest.raises(KeyboardInterrupt):
        shared.wait()
    assert not shared.done()
    shared.wait()
    assert shared.done()
    assert len(calls) == 2


def test_what_work_uses_lives_as_long_as_the_work(helper: Helper, busy: threading.Event) -> None:
    """Buffers are kept until it is done, though nobody has its handle, and not longer, though somebody has it."""

    class Memory:
        pass

    memory, dropped = Memory(), Memory()
    kept, kept_too = weakref.ref(memory), weakref.ref(dropped)
    shared = helper.give(lambda memory=memory: None)
    helper.give(lambda memory=dropped: None)
    del memory, dropped
    assert kept() is not None
    assert kept_too() is not None
    busy.set()
    helper.close()
    assert shared.done()
    assert kept() is None
    assert kept_too() is None


def test_a_closed_helper_has_done_all_and_leaves_the_rest_to_waiters(helper: Helper, busy: threading.Event) -> None:
    """Closing ends the thread behind all that it was given; twice is fine."""
    given = [helper.give(lambda: None) for _ in range(3)]
    closing = threading.Thread(target=helper.close)
    closing.start()
    busy.set()
    closing.join()
    assert all(shared.done() for shared in given)
    assert "test-helper" not in {thread.name for thread in threading.enumerate()}
    helper.close()
    late = helper.give(lambda: None)
    assert not late.done()
    late.wait()
    assert late.done()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_its_work_itself_and_can_close(helper: Helper) -> None:
    """A fork copies no thread: neither a wait nor a close of the child may hang on it."""
    helper.give(lambda: None).wait()
    child = os.fork()
    if child == 0:
        found: list[int] = []
        helper.give(lambda: found.append(1)).wait()
        helper.close()
        os._exit(0 if found == [1] else 1)
    assert os.waitpid(child, 0)[1] == 0
