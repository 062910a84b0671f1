"""What every engine of asynchronous I/O offers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from infinity.aio.request import Request
from infinity.handles import Handle


class EngineState(Enum):
    """An engine is open until it is closed."""

    OPEN = auto()
    CLOSED = auto()


ENGINE_MOVES = {EngineState.OPEN: (EngineState.CLOSED,), EngineState.CLOSED: ()}


class Engine(Protocol):
    """Takes requests from any thread and works on `queue_depth` pieces of `block_bytes` at a time, across requests.

    Reads go before writes, without starving them; nothing else is ordered: who needs an order waits for the first handle.
    """

    @property
    def name(self) -> str:
        """How people call the engine: "uring" or "threads"."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        """Queue the requests and return a handle for each, in order; never waits for I/O.

        A handle's `wait` raises StorageError when its request failed. Raises IllegalTransition once the engine is closed.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted, fail what is still queued, and stop; closing twice is fine.

        Raises StorageError when requests have failed that nobody waited for (reads that the close itself cancelled aside).
        """
        ...
