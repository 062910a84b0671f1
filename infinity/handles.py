"""The one shape of everything asynchronous: a handle with `wait()` and `done()` that keeps its buffers alive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from infinity.errors import InfinityError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A result that may not be there yet. Waiting twice is fine and gives the same result or error."""

    def wait(self) -> T_co:
        """Block until the work is over; return its result or raise its error."""
        ...

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


class Ready(Generic[T]):
    """A handle whose result was there from the start."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        return self._result

    def done(self) -> bool:
        return True


class AllOf:
    """A handle over several; it waits for every one of them before it raises the first error."""

    __slots__ = ("_handles",)

    def __init__(self, handles: Sequence[Handle[object]]) -> None:
        self._handles = tuple(handles)

    def wait(self) -> None:
        first_error: BaseException | None = None
        for handle in reversed(self._handles):  # when the last is over the others mostly are, and cost no wait of their own
            try:
                handle.wait()
            except Exception as error:  # noqa: BLE001 - kept and raised below, when no buffer is in use any more
                first_error = error
        if first_error is not None:
            raise first_error

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)


def wait_until_over(handles: Sequence[Handle[object]]) -> None:
    """Wait for every handle, also when interrupted: for who takes away next what they use. Raises the first error."""
    together = AllOf(handles)
    try:
        together.wait()
    finally:  # at no cost where the first wait saw the end of all
        with suppress(InfinityError):
            together.wait()


class Promise(Generic[T]):
    """A handle that another thread fulfils once, with `resolve` or `fail`."""

    __slots__ = ("_error", "_event", "_result")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def resolve(self, result: T) -> None:
        self._result = result
        self._event.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> T:
        self._event.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def done(self) -> bool:
        return self._event.is_set()
