"""Where one micro-batch is on its walk through the units."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, order=True)
class Visit:
    """The n-th call of a unit by one micro-batch, or (`after`) the stretch between that call and the next one."""

    unit: int
    ordinal: int
    after: bool = False


# The stretch before the first call.
START = Visit(-1, 0, after=True)


@dataclass(frozen=True, slots=True)
class TrackedLeaf:
    """A leaf that stands for a parameter during one call or between two calls, so that its gradient comes to us alone."""

    shard: int
    parameter: str
    visit: Visit  # what its gradient is booked to
    tensor: torch.nn.Parameter


@dataclass(frozen=True, slots=True)
class LastCall:
    """What reaches the most recent unit call from before: the place where the tail can be cut off."""

    visit: Visit
    inputs: tuple[torch.Tensor, ...]  # aliases that were made for this call alone; those that require grad
    anchor: torch.Tensor | None  # requires grad; None where the call is ordinary autograd


@dataclass(slots=True)
class MicroBatch:
    """The walk of one micro-batch. `index` counts within the step and rank, `global_index` over all ranks."""

    index: int
    global_index: int
    position: int = 0  # entries to and exits from units so far
    visits: list[Visit] = field(default_factory=list)
    num_calls: dict[int, int] = field(default_factory=dict)  # by unit
    walking: bool = False  # its forward is not over
    learning: bool = False  # any call may turn out to be the last one
    straight: bool = False  # in the tail: the last unit is followed straight by backward, without a rerun
    last_call: LastCall | None = None
    leaves: list[TrackedLeaf] = field(default_factory=list)  # made since the last call began; for the straight backward

    @property
    def stretch(self) -> Visit:
        """Return the stretch between two calls that the micro-batch is in."""
        return Visit(self.visits[-1].unit, self.visits[-1].ordinal, after=True) if self.visits else START

    def next_visit(self, unit: int) -> Visit:
        """Return which visit a call of the unit would be."""
        return Visit(unit, self.num_calls.get(unit, 0))

    def enter(self, unit: int) -> None:
        """Begin a call of the unit."""
        visit = self.next_visit(unit)
        self.num_calls[unit] = visit.ordinal + 1
        self.visits.append(visit)
        self.position += 1

    def forget(self) -> None:
        """The forward is over: let go of the tensors, whose graph may know this micro-batch and so live for ever."""
        self.walking = False
        self.last_call = None
        self.leaves.clear()
