"""Where an engine is in a step, which moves are legal, and which errors end it."""

from __future__ import annotations

from enum import Enum
from types import TracebackType

from infinity.comm.group import Group
from infinity.errors import CommError, IllegalTransition, InfinityError
from infinity.states import Lifecycle


class EngineState(Enum):
    """Where the engine is in a step. FAILED: states may be half updated. CLOSED: everything was given back."""

    READY = "ready"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEPPING = "stepping"
    FAILED = "failed"
    CLOSED = "closed"


_R, _F, _B, _S = EngineState.READY, EngineState.FORWARD, EngineState.BACKWARD, EngineState.STEPPING
ENDS = (EngineState.FAILED, EngineState.CLOSED)
MOVES = {
    _R: (_F, _S, *ENDS),
    _F: (_F, _B, _R, _S, *ENDS),  # a forward that is never backpropagated is legal
    _B: (_F, _B, _S, _R, *ENDS),
    _S: (_R, *ENDS),
    EngineState.FAILED: (EngineState.CLOSED,),
    EngineState.CLOSED: (),
}


class FailsOnIo:
    """An error of storage, memory or between ranks inside the block leaves the engine FAILED: states may be half updated.

    The other ranks hear of it.
    """

    def __init__(self, lifecycle: Lifecycle[EngineState], group: Group) -> None:
        self._lifecycle = lifecycle
        self._group = group

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The update stream refuses loads after its first error, which is what the user has to hear of.
        cause = error.__cause__ if isinstance(error, IllegalTransition) else error
        if not (isinstance(cause, OSError | MemoryError | CommError) and isinstance(cause, InfinityError)):
            return
        if self._lifecycle.state not in ENDS:
            self._lifecycle.to(EngineState.FAILED)
        self._group.fail(str(cause))
        if cause is not error:
            raise cause
