"""What the update stream hands out for a shard that it was asked to load."""

from __future__ import annotations

from typing import Generic, TypeVar

from infinity.handles import Handle, Promise

T = TypeVar("T")


class Failed:
    """A handle of something that failed before it began."""

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True


class Later(Generic[T]):
    """A handle of something that another thread has yet to begin; `follow` says, once, which handle it is."""

    __slots__ = ("_handle",)

    def __init__(self) -> None:
        self._handle: Promise[Handle[T]] = Promise()

    def follow(self, handle: Handle[T]) -> None:
        self._handle.resolve(handle)

    def wait(self) -> T:
        return self._handle.wait().wait()

    def done(self) -> bool:
        return self.begun and self._handle.wait().done()

    @property
    def begun(self) -> bool:
        return self._handle.done()


class Load:
    """The handle of `UpdateStream.load`: the buffer holds the shard's newest weights when `wait` returns.

    `written` is done when neither a read nor a write uses the buffer any more: only then may it be filled with something
    else or given back.
    """

    __slots__ = ("ready", "written")

    def __init__(self) -> None:
        self.ready: Later[None] = Later()
        self.written: Later[None] = Later()

    def wait(self) -> None:
        self.ready.wait()

    def done(self) -> bool:
        return self.ready.done()

    def fail(self, error: BaseException) -> None:
        """Fail what has not begun yet."""
        for handle in (self.ready, self.written):
            if not handle.begun:
                handle.follow(Failed(error))
