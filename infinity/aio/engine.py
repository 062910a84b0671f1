"""What every engine of asynchronous I/O offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from infinity.aio.files import DirectFile
from infinity.aio.request import Request
from infinity.handles import Handle


class EngineState(Enum):
    """An engine is open until it is closed."""

    OPEN = auto()
    CLOSED = auto()


ENGINE_MOVES = {EngineState.OPEN: (EngineState.CLOSED,), EngineState.CLOSED: ()}


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Mapped memory that requests will move bytes from or to."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine made of what it was given to register, as of now. Both are False where nothing was given."""

    registered_files: bool  # every file is
    registered_buffers: bool  # every memory range is
    notes: tuple[str, ...]  # one sentence with its remedy for each thing that was asked for and could not be had


UNREGISTERED = EngineFacts(registered_files=False, registered_buffers=False, notes=())


class RequestHandle(Handle[None], Protocol):
    """The handle of one request."""

    @property
    def latency_nanoseconds(self) -> int | None:
        """How long the whole request took: from the issue of its first piece until the engine saw the end of its last.

        The time that it waited in the engine behind a full queue is not in it (as in fio's clat). None until the request is
        over, and where nothing of it was issued.
        """
        ...


class Engine(Protocol):
    """Takes requests from any thread and works on `queue_depth` pieces of `block_bytes` at a time, across requests.

    Reads go before writes, without starving them; nothing else is ordered: who needs an order waits for the first handle.
    """

    @property
    def name(self) -> str:
        """How people call the engine: "uring", "threads" or "buffered"."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """What is registered at this moment, and what could not be."""
        ...

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """Make requests on these files and this memory cheaper where the system allows; `facts` says what came of it.

        Called when nothing on them is in flight, by whoever opened them. Never fails for a limit; raises IllegalTransition
        once the engine is closed.
        """
        ...

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """Take back `register`, before a file is closed or memory is unmapped; what was never registered is ignored.

        Raises IllegalTransition for a file with requests in flight. Does nothing once the engine is closed.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Queue the requests and return a handle for each, in order; never waits for I/O.

        A handle's `wait` raises StorageError when its request failed. Raises IllegalTransition once the engine is closed.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted, fail what is still queued, and stop; closing twice is fine.

        Raises StorageError when requests have failed that nobody waited for (reads that the close itself cancelled aside).
        """
        ...
