"""SIGINT and SIGTERM: the first lets the step in flight end; the second, and one before the first step, stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The user stopped the run at once; `exit_code` is 128 + the signal's number, as shells report it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number


class StopRequest:
    """Whether and how the user asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # that came to this rank
        self.agreed: signal.Signals | None = None  # that stops the run, known to every rank after the same step
        self._announce: Callable[[str], None] | None = None  # None: nothing is running that a signal would wait for
        self._raised: signal.Signals | None = None

    def wait_for_steps(self, announce: Callable[[str], None]) -> None:
        """Steps are running from now on: a signal lets the one in flight end, and is announced."""
        self._announce = announce

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal; raises Stopped where it cannot wait for the end of a step."""
        received = signal.Signals(number)
        if self._announce is None or self.signal is not None:
            for other in _SIGNALS:  # one more ends the process, whatever it is doing
                signal.signal(other, signal.SIG_DFL)
            self._raised = received
            raise Stopped(received)
        self.signal = received
        if self.agreed is None:  # with it another rank has announced the stop
            self._announce(f"{received.name}: this step ends first, then a checkpoint is written. Once more stops at once.")

    def agree(self, numbers: Sequence[int]) -> None:
        """Take the signals that came to the ranks, 0 where none did; the first that is agreed on stays."""
        if self.agreed is None and any(numbers):
            self.agreed = signal.Signals(max(numbers))

    def raise_again(self) -> None:
        """Raise Stopped where it was raised before and lost: a module that is being imported may catch whatever comes."""
        if self._raised is not None:
            raise Stopped(self._raised)

    @property
    def exit_code(self) -> int:
        return 128 + self.agreed if self.agreed else 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handle both signals inside the block, which may be inside another one.

    Outside the main thread Python allows no handlers, so none are set. Raises Stopped at the end of the block where it was
    lost inside: swallowed, or replaced by an error of something that was closed because of it.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        request.raise_again()
