"""Connects the ranks of a job so that one that cannot ends the attempts of all: by itself gloo waits for it for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

_FAILED = "failed"
_LOOK_SECONDS = 0.2


class FlagStore(Protocol):
    """What connecting needs of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


class _Attempt(Generic[T]):
    """One call on a thread of its own, so that this one can look around, and take signals."""

    def __init__(self, connect: Callable[[], T]) -> None:
        self._connect = connect
        self.made: list[T] = []
        self.error: RuntimeError | None = None
        self.thread = threading.Thread(target=self._run, name="comm-connect", daemon=True)

    def _run(self) -> None:
        try:
            self.made.append(self._connect())
        except RuntimeError as error:  # what torch raises
            self.error = error


def connect_together(connect: Callable[[], T], store: FlagStore, rank: int) -> T:
    """Return what `connect` makes, which blocks until every rank has called it.

    `store` is a connection of its own to what all ranks share. Raises RuntimeError that names the rank which could not
    connect, in all of them; the attempt of the others is left to itself.
    """
    attempt = _Attempt(connect)
    attempt.thread.start()
    while attempt.thread.is_alive():
        attempt.thread.join(_LOOK_SECONDS)
        if attempt.thread.is_alive() and store.check([_FAILED]):
            raise RuntimeError(store.get(_FAILED).decode())
    if attempt.error is not None:
        reason = f"rank {rank} could not connect: {str(attempt.error).splitlines()[0]}"
        store.set(_FAILED, reason)
        raise RuntimeError(reason) from attempt.error
    return attempt.made[0]
