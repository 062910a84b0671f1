"""The forward and backward passes of one step of the familiar loop: how many there were, and where the step ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infinity.errors import IllegalTransition


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One of the familiar loop: what a backward knows of the forward that it goes through."""

    step_number: int
    index: int  # within the step


class Passes:
    """Counts what an engine is told of. One thread.

    A step ends when a fixed number of forward passes have run backward, each once or more often, or where the user says.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.num_forwards = 0  # micro-batches begun since the last step
        self._reached: set[int] = set()  # forward passes that a backward went through
        self._spent: set[int] = set()  # those of them whose graph is gone
        self._num_running = 0  # ways of backward into a forward pass that began and did not end; 0 between calls
        self.step_number = 0  # changes with every step that is taken or discarded
        self._gradients_are_final = False  # somebody has looked at them
        self._said: bool | None = None
        self._holds_back = False
        self._ends_here = False  # the step was closed by `close_step_after`

    # Where the step ends

    def say(self, is_boundary: bool | None) -> None:
        """Let the user decide from now on where a step ends; None gives the decision back to the count."""
        self._said = is_boundary

    @property
    def at_boundary(self) -> bool:
        """Whether no more micro-batches belong to the step."""
        if self._holds_back or not self._reached:
            return False
        if self._ends_here:
            return True
        return self.num_backwards >= self.num_micro_batches if self._said is None else self._said

    @property
    def sums_outlast(self) -> bool:
        """Whether gradients may have to wait for another micro-batch."""
        return self.num_micro_batches > 1 or self._said is not None or self._holds_back

    def require_step(self) -> None:
        """Raise IllegalTransition inside `hold_back` and `close_step_after`."""
        if self._holds_back:
            raise IllegalTransition(
                "step was called inside no_sync or coalesce_grad_reduction.",
                remedy="Leave the block; after no_sync run the last backward; then step.",
            )

    @contextmanager
    def hold_back(self, call: str) -> Iterator[None]:
        """Inside the block, which is known as `call`, the step does not end: gradients are only summed.

        Raises IllegalTransition when nested.
        """
        if self._holds_back:
            raise IllegalTransition(
                f"{call} was entered inside no_sync or coalesce_grad_reduction.", remedy="Enter one of them, once."
            )
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    @contextmanager
    def close_step_after(self) -> Iterator[None]:
        """The backward passes inside the block are the step's last ones, however many: it ends with the block."""
        with self.hold_back("coalesce_grad_reduction"):
            yield
        self._ends_here = bool(self._reached)

    # What was run

    @property
    def num_backwards(self) -> int:
        """Forward passes of the step that a backward went through."""
        return len(self._reached)

    def begin_forward(self) -> ForwardPass:
        """Count one more."""
        self.num_forwards += 1
        return ForwardPass(self.step_number, self.num_forwards - 1)

    def begin_backward(self, forward: ForwardPass) -> None:
        """A backward goes into this forward pass. Raises IllegalTransition as `_require_backward` does."""
        self._require_backward(forward.step_number)
        self._num_running += 1
        self._reached.add(forward.index)

    def end_backward(self, forward: ForwardPass, *, keeps_graph: bool) -> None:
        """That backward is over; another one may come where the graph was kept."""
        self._num_running -= 1
        if not keeps_graph:
            self._spent.add(forward.index)

    @property
    def has_failed(self) -> bool:
        """Whether a backward began and did not end: part of its gradient was summed already."""
        return self._num_running > 0

    def _require_backward(self, step_number: int) -> None:
        """Raise IllegalTransition for a loss of another step than this one, and when its gradients are final."""
        if step_number != self.step_number:
            raise IllegalTransition(
                "A loss was backpropagated whose step is over: it was taken, or discarded after an error or by zero_grad.",
                remedy="Call backward before engine.step(), for the losses of the forward passes since the last one.",
            )
        if self._gradients_are_final:
            raise IllegalTransition(
                "A loss was backpropagated after the step's gradients were read or set.",
                remedy="Look at gradients between the last backward of a step and engine.step().",
            )

    def require_none_waiting(self, call: str) -> None:
        """Raise IllegalTransition when gradients wait for a step."""
        if self.num_backwards:
            raise IllegalTransition(
                f"{call} was called {self.num_backwards} of {self.num_micro_batches} backward passes into a step.",
                remedy="Finish that step with engine.step() after the last of them, or discard it with engine.zero_grad().",
            )

    def require_no_graph(self, call: str) -> None:
        """Raise IllegalTransition while a backward is to come whose forward has used the weights."""
        if self.num_forwards != len(self._spent):
            raise IllegalTransition(
                f"{call} was called between a forward and its backward.",
                remedy="Run backward first, or give the forward up with engine.zero_grad().",
            )

    def finish(self) -> None:
        """The gradients are final. Raises IllegalTransition before the last backward of the step."""
        if not self.at_boundary:
            raise IllegalTransition(
                f"Gradients were asked for after {self.num_backwards} of {self.num_micro_batches} backward passes, "
                "incomplete.",
                remedy="Ask between the last backward of a step and engine.step().",
            )
        self._gradients_are_final = True

    def forget(self) -> None:
        """The step was taken or discarded."""
        self.num_forwards = self._num_running = 0
        self._reached.clear()
        self._spent.clear()
        self.step_number += 1
        self._gradients_are_final = self._ends_here = False
