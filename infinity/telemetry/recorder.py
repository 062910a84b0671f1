"""The recorder: counters and spans of one process, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: from `start_ns` to `end_ns` of the monotonic clock, on one thread."""

    name: str
    start_ns: int
    end_ns: int
    thread_id: int
    thread_name: str
    attributes: dict[str, Attribute]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Recorder:
    """What happened so far. Safe to use from any thread.

    Counters are few and kept for ever; of the spans the latest `max_spans` are kept, `num_spans_dropped` counts
    the others. `clock_ns` is any monotonic clock in nanoseconds.
    """

    def __init__(self, *, max_spans: int = 100_000, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._counters_taken: dict[str, int] = {}
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._num_spans = 0

    def count(self, name: str, amount: int) -> None:
        """Add `amount` to a counter, which starts at 0."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def span(self, name: str, **attributes: Attribute) -> OpenSpan:
        """Return a context manager that records the time spent in it, also when an exception ends it."""
        return OpenSpan(self, name, attributes)

    def add_span(self, name: str, start_ns: int, end_ns: int, **attributes: Attribute) -> None:
        """Record a span whose ends were measured elsewhere, in nanoseconds of `now_ns`'s clock."""
        thread = threading.current_thread()
        span = Span(name, start_ns, end_ns, thread.ident or 0, thread.name, attributes)
        with self._lock:
            self._spans.append(span)
            self._num_spans += 1

    def now_ns(self) -> int:
        """Return the time on the recorder's clock."""
        return self._clock_ns()

    def counters(self) -> dict[str, int]:
        """Return every counter's total since the start."""
        with self._lock:
            return dict(self._counters)

    def take_counters(self) -> dict[str, int]:
        """Return by how much every counter grew since the last call: what belongs to the step that ends here.

        Every counter seen so far is named, with 0 where nothing was counted. Totals are not changed.
        """
        with self._lock:
            grown = {name: total - self._counters_taken.get(name, 0) for name, total in self._counters.items()}
            self._counters_taken = dict(self._counters)
        return grown

    def spans(self) -> list[Span]:
        """Return the spans that are kept, in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    @property
    def num_spans_dropped(self) -> int:
        with self._lock:
            return self._num_spans - len(self._spans)


class OpenSpan:
    """A span that has not ended; `Recorder.span` makes it."""

    __slots__ = ("_attributes", "_name", "_recorder", "_start_ns")

    def __init__(self, recorder: Recorder, name: str, attributes: dict[str, Attribute]) -> None:
        self._recorder = recorder
        self._name = name
        self._attributes = attributes
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = self._recorder.now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.add_span(self._name, self._start_ns, self._recorder.now_ns(), **self._attributes)
