"""The peak of what a process holds where several share pages, looked at now and then: the kernel keeps no such peak."""

from __future__ import annotations

import time
from collections.abc import Callable

# The kernel walks all pages for an answer, a quarter of a second for each GiB of small ones: so rarely does it cost 2 %.
_PAUSES_PER_LOOK = 50


class SharedMemoryPeak:
    """The greatest `measure()` of those made by `look`, which is called often and measures rarely."""

    def __init__(self, measure: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._measure = measure
        self._clock = clock
        self._next_at = clock()

    def look(self) -> None:
        """Measure, unless the last time was too short ago for what that took."""
        started = self._clock()
        if started < self._next_at:
            return
        self.num_bytes = max(self.num_bytes, self._measure())
        ended = self._clock()
        self._next_at = ended + _PAUSES_PER_LOOK * (ended - started)
