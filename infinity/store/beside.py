"""Work on bytes in flight that a thread does beside: whoever needs it finds it done, or does it where nobody has begun.

So nothing hangs on the thread: it may be busy, blocked behind a slow disk, or, in a forked child, not there at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

from infinity.errors import PlatformError
from infinity.states import Lifecycle


class WorkState(Enum):
    """GIVEN: whoever comes first does it. BEGUN: one thread does it. OVER: done, or failed for good."""

    GIVEN = "given"
    BEGUN = "begun"
    OVER = "over"


_WORK_MOVES = {
    WorkState.GIVEN: (WorkState.BEGUN,),
    WorkState.BEGUN: (WorkState.OVER, WorkState.GIVEN),  # the last: interrupted
    WorkState.OVER: (),
}


class SharedWork:
    """The handle of work that is done once, by the thread it was given to or by the first who waits for it.

    `done` only looks. An error of the work is raised by every `wait`. The work is let go of, with all that it keeps alive,
    when it is over; one that is interrupted (KeyboardInterrupt) is done again from its start.
    """

    # The handle of a write lives until the next one. A lock for each would be as long a small block of malloc's, and such
    # blocks between those of tensors that come and go keep the free ones from being joined.
    __slots__ = ("_changed", "_error", "_lifecycle", "_work")

    def __init__(self, work: Callable[[], None], changed: threading.Condition) -> None:
        self._work: Callable[[], None] | None = work  # None when it is over
        self._changed = changed
        self._lifecycle = Lifecycle("Work beside", WorkState.GIVEN, _WORK_MOVES)
        self._error: Exception | None = None

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._lifecycle.state is WorkState.OVER

    def settle(self) -> None:
        """Do the work, or wait for who does it; its error is kept for `wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lifecycle.state is not WorkState.BEGUN)
            work = self._work
            if work is None:
                return
            self._lifecycle.to(WorkState.BEGUN)
        is_over = False
        try:
            work()
            is_over = True
        except Exception as error:  # noqa: BLE001 - every `wait` raises it
            self._error, is_over = error, True
        finally:
            with self._changed:
                self._lifecycle.to(WorkState.OVER if is_over else WorkState.GIVEN)
                self._work = None if is_over else work
                self._changed.notify_all()


class Helper:
    """A thread that does what it is given, in order. Safe to use from any thread; `open_helper` starts it."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[SharedWork | None] = SimpleQueue()  # None: it ends
        self._changed = threading.Condition()  # one for all that is given
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread (called once, by `open_helper`). Raises PlatformError where the system has no thread left."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise PlatformError(f"The thread {self._thread.name} cannot be started.", remedy="Raise `ulimit -u`.") from error

    def give(self, work: Callable[[], None]) -> SharedWork:
        """Queue the work behind what was given before, and return its handle."""
        shared = SharedWork(work, self._changed)
        self._given.put(shared)
        return shared

    def close(self) -> None:
        """End the thread when all that was given is done. What is given later is left to waiters. Closing twice is fine."""
        self._given.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (shared := self._given.get()) is not None:
            shared.settle()


def open_helper(name: str) -> Helper:
    """Return a running helper whose thread has this name. Raises PlatformError."""
    helper = Helper(name)
    helper.start()
    return helper
