"""Work on bytes in flight that a thread does beside: whoever needs it finds it done, or does it where nobody has begun.

So nothing hangs on the thread: it may be busy, blocked behind a slow disk, or, in a forked child, not there at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from infinity.errors import PlatformError


class SharedWork:
    """The handle of work that is done once, by the thread it was given to or by the first who waits for it.

    `done` only looks. An error of the work is raised by every `wait`. The work is let go of, with all that it keeps alive,
    when it is done; one that is interrupted (KeyboardInterrupt) is done again from its start.
    """

    __slots__ = ("_error", "_lock", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work  # None when it is done
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def wait(self) -> None:
        self.settle()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._work is None

    def settle(self) -> None:
        """Do the work, or wait for who does it; its error is kept for `wait`."""
        if self._work is None:
            return
        with self._lock:
            if self._work is None:
                return
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - every `wait` raises it
                self._error = error
            self._work = None


class Helper:
    """A thread that does what it is given, in order. Safe to use from any thread; `open_helper` starts it."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[SharedWork | None] = SimpleQueue()  # None: it ends
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread (called once, by `open_helper`). Raises PlatformError where the system has no thread left."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise PlatformError(f"The thread {self._thread.name} cannot be started.", remedy="Raise `ulimit -u`.") from error

    def give(self, work: Callable[[], None]) -> SharedWork:
        """Queue the work behind what was given before, and return its handle."""
        shared = SharedWork(work)
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
