"""Sums of gradients: fp32 accumulators per (parameter, visit), rounded once when a shard is final, then handed on.

Each accumulator sums its micro-batches in the order in which backward brings them, which every schedule makes ascending;
visits are added in their own order. So the result does not depend on the schedule. A shard is final when its last pending
call has run backward. A first contribution is kept as it is, so that one micro-batch costs no fp32 copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from infinity.errors import IllegalTransition
from infinity.zero.lasting_sums import LastingSums, SumsPlace, lasting_sums
from infinity.zero.micro_batch import Visit
from infinity.zero.shard import Shard
from infinity.zero.turns import Turns


@dataclass(frozen=True, slots=True)
class FinalRun:
    """A run of a final gradient: what belongs from state element `start` of the shard on."""

    start: int
    values: torch.Tensor  # 1-D, contiguous; fp32, or as autograd gave it where there was only one


class GradientTarget(Protocol):
    """Takes the final gradient of a shard, to the tier where it waits for the update."""

    @property
    def sums_micro_batches(self) -> bool:
        """Whether every micro-batch's gradient is taken by itself, where they would otherwise be summed here."""
        ...

    def publish(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """Round the runs to grad_dtype, to nearest even and once; the gradient is zero where no run is. They ascend.

        Runs lie in the whole unit. `touched` names the parameters that received a gradient. Not called where none did, but
        where shards have turns.
        """
        ...

    def begin_micro_batches(self) -> None:
        """A step begins that brings each shard once for every micro-batch."""
        ...

    def settle(self) -> None:
        """Let go of every buffer that what was published is still in."""
        ...

    def finish(self) -> None:
        """All has been published: when this returns, every gradient is where it waits or on its way there."""
        ...


def fill(flat: torch.Tensor, runs: Sequence[FinalRun]) -> None:
    """Make `flat`, 1-D of grad_dtype and [num_state_elements], the gradient whose runs these are."""
    flat.zero_()
    for run in runs:
        flat[run.start : run.start + run.values.numel()].copy_(run.values)


@dataclass(slots=True)
class _Sum:
    """One accumulator: the first gradient as it came, an fp32 sum from the second on."""

    value: torch.Tensor
    num_added: int = 1

    def add(self, gradient: torch.Tensor) -> None:
        if self.num_added == 1:
            self.value = self.value.to(torch.float32, copy=True)
        self.value.add_(gradient)
        self.num_added += 1


@dataclass(slots=True)
class _ShardSums:
    num_pending_calls: int = 0
    sums: dict[tuple[str, Visit], _Sum] = field(default_factory=dict)  # by (parameter, visit)
    lasting: LastingSums | None = None  # in their stead where they outlast micro-batches
    final: bool = False


class GradientSums:
    """The accumulators of one step. `open` allows shards to become final; `finish` makes all of them final.

    Owner: the schedule. One thread. After an exception: `discard` drops everything.
    """

    def __init__(
        self, shards: Sequence[Shard], target: GradientTarget, place: SumsPlace | None = None, turns: Turns | None = None
    ) -> None:
        self._shards = shards
        self._target = target
        self._place = place  # for sums that outlast micro-batches; None: they stay as they are
        self._turns = turns  # None: one rank, which waits for nobody
        self._lasting_in: SumsPlace | None = None  # that place, in a step where they do
        self._each_is_published = False  # micro-batch by micro-batch, in this step
        self._states = [_ShardSums() for _ in shards]
        self._complete_shards_are_final = False
        self._begun = False

    @property
    def publishes_micro_batches(self) -> bool:
        """Whether micro-batches that run backward one by one are published one by one."""
        return self._target.sums_micro_batches

    def outlast_micro_batches(self) -> None:
        """The micro-batches of this step run backward one by one: let sums wait in their place, until the step is over."""
        if self._target.sums_micro_batches:
            self._each_is_published = True
            self._target.begin_micro_batches()
        else:
            self._lasting_in = self._place

    def expect(self, shards: Sequence[int]) -> None:
        """Register a call whose backward is to come."""
        self._begun = True
        for shard in shards:
            self._states[shard].num_pending_calls += 1

    def add(self, shard: int, parameter: str, visit: Visit, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient from one visit."""
        self._begun = True
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        state = self._states[shard]
        if state.final:
            raise IllegalTransition(
                f"Parameter {parameter} got a gradient after {self._shards[shard].layout.name} was final.",
                remedy="Run backward once for each forward, or all but the last with retain_graph=True.",
            )
        if self._lasting_in is not None:
            if state.lasting is None:
                state.lasting = lasting_sums(self._shards[shard].whole, self._lasting_in)
            state.lasting.add(parameter, visit, gradient)
            return
        present = state.sums.get((parameter, visit))
        if present is None:
            state.sums[parameter, visit] = _Sum(gradient)
        else:
            present.add(gradient)

    def complete(self, shards: Sequence[int]) -> None:
        """Register that a call's backward has run."""
        for shard in shards:
            state = self._states[shard]
            state.num_pending_calls -= 1
            if self._complete_shards_are_final and state.num_pending_calls == 0 and self._shards[shard].group.units:
                self._ready(shard)
            elif state.lasting is not None:
                state.lasting.leave()

    def open(self, *, is_last: bool = True) -> None:
        """A backward begins: where it is the step's last, from now on a shard without pending calls is final.

        So it is in every backward whose gradient is published by itself.
        """
        self._begun = True
        if not (is_last or self._each_is_published):
            return
        self._complete_shards_are_final = True
        for shard, state in enumerate(self._states):
            has_sums = state.sums or state.lasting is not None or self._turns is not None
            if state.num_pending_calls == 0 and has_sums and self._shards[shard].group.units:
                self._ready(shard)

    def backward_over(self) -> None:
        """The backward of a micro-batch has ended, where they run one by one."""
        if self._each_is_published:
            self._all_are_final()
            if self._turns is not None:
                self._turns.begin()
            for state in self._states:
                state.final = False
            self._complete_shards_are_final = False

    def finish(self) -> None:
        """Backward has ended: calls that were never reached count no more. A second time it does nothing."""
        if not self._begun:
            return
        if not self._each_is_published:
            self._all_are_final()
        self._target.finish()
        self.discard()

    def give_up(self) -> None:
        """All ranks discard the step: shards that others may have published already are published here, too."""
        if self._turns is not None and self._complete_shards_are_final:
            self._all_are_final()
            self._target.settle()
        self.discard()

    def discard(self) -> None:
        """Forget everything, as before the first call of a step."""
        self._states = [_ShardSums() for _ in self._shards]
        self._complete_shards_are_final = self._begun = self._each_is_published = False
        self._lasting_in = None
        if self._turns is not None:
            self._turns.begin()
        if self._place is not None:
            self._place.discard()

    def _all_are_final(self) -> None:
        for shard in range(len(self._shards)) if self._turns is None else self._turns.rest():
            self._finalise(shard)

    def _ready(self, shard: int) -> None:
        """No gradient of the shard is to come."""
        for final in (shard,) if self._turns is None else self._turns.ready(shard):
            self._finalise(final)

    def _finalise(self, shard: int) -> None:
        state = self._states[shard]
        if state.final:
            return
        state.final = True
        if state.lasting is not None:
            state.lasting.finish()
            return
        layout = self._shards[shard].whole
        totals = _over_visits(state.sums)
        if not totals and self._turns is None:
            return
        state.sums.clear()
        touched, runs = frozenset(totals), []
        for section in layout.sections:
            for segment in section.segments if section.trainable else ():
                if segment.parameter in touched:
                    total = totals.pop(segment.parameter).reshape(-1)  # where that copies, what it copied is gone at once
                    part = total[segment.parameter_offset : segment.parameter_offset + segment.length]
                    runs.append(FinalRun(section.state_offset + segment.offset, part))
        self._target.publish(shard, runs, touched)
        if self._lasting_in is not None:
            self._target.settle()  # other shards' sums need its buffers


def _over_visits(sums: Mapping[tuple[str, Visit], _Sum]) -> dict[str, torch.Tensor]:
    totals: dict[str, torch.Tensor] = {}
    for (parameter, _), visit in sorted(sums.items(), key=lambda item: item[0]):
        before = totals.get(parameter)
        totals[parameter] = visit.value if before is None else before.to(torch.float32).add(visit.value)
    return totals
