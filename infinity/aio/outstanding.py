"""The requests whose end nobody has taken notice of: it keeps their buffers alive and knows the failures to report."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from infinity.aio.request import Op, Request
from infinity.errors import StorageError

_SWEEP_AT = 64


class TrackedHandle(Protocol):
    """A handle whose failure can be looked at without raising it."""

    @property
    def request(self) -> Request: ...

    def done(self) -> bool: ...

    def failure(self) -> StorageError | None:
        """Return why the request failed; only once `done`."""
        ...


class Outstanding:
    """A set of handles, safe for any thread. Handles that went well leave by themselves when the set has doubled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: set[TrackedHandle] = set()
        self._sweep_at = _SWEEP_AT

    def add(self, handles: Iterable[TrackedHandle]) -> None:
        with self._lock:
            self._handles.update(handles)
            if len(self._handles) >= self._sweep_at:
                self._handles = {handle for handle in self._handles if not handle.done() or handle.failure() is not None}
                self._sweep_at = max(_SWEEP_AT, 2 * len(self._handles))

    def notice(self, handle: TrackedHandle) -> None:
        """Somebody has waited for the handle."""
        with self._lock:
            self._handles.discard(handle)

    def raise_failures(self) -> None:
        """Raise StorageError for the failed requests that nobody has waited for; all requests are over."""
        with self._lock:
            handles, self._handles = self._handles, set()
        failures = [(handle.request.op, handle.failure()) for handle in handles if handle.done()]  # else it was refused
        raise_unwaited([(op, failure) for op, failure in failures if failure is not None])


def raise_unwaited(failures: Sequence[tuple[Op, StorageError]]) -> None:
    """Raise one StorageError for failures that nobody has waited for; a read that `close` cancelled lost nothing."""
    lost = [failure for op, failure in failures if not (failure.errno == errno.ECANCELED and op is Op.READ)]
    if lost:
        first = lost[0]
        raise type(first)(
            f"{len(lost)} request(s) failed and nobody waited for them; one of them: {first.message}",
            remedy=first.remedy,
            errno=first.errno or 0,
        )
