"""Sums that outlast a micro-batch: where backward runs once for each, every unit's fp32 sums wait for the next one.

They are held by a `SumsPlace` as flat arrays, one for each visit to which gradients of the shard are booked, so that they
can leave memory between two calls. Order and precision of all additions are those of sums that stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from infinity.store.layout import ShardLayout
from infinity.zero.micro_batch import Visit

# Where a run of a parameter lies: in the shard's flat array, and in the flattened parameter.
Run = tuple[slice, slice]


class SumsPlace(Protocol):
    """Holds the sums of all shards between the calls of their units."""

    def at(self, shard: int, number: int, *, fresh: bool) -> torch.Tensor:
        """Return the shard's array of this number, fp32 [num_state_elements], to be read and changed in place.

        `fresh`: it begins anew, what it holds does not matter. The tensor is valid until another shard is asked for, or any
        other method is called.
        """
        ...

    def leave(self, shard: int) -> None:
        """The shard's arrays are not needed for some time."""
        ...

    def publish(self, shard: int, total: torch.Tensor, touched: frozenset[str]) -> None:
        """Take the final gradient, one of the shard's arrays; the arrays are free then. `touched` as in GradientTarget."""
        ...

    def discard(self) -> None:
        """The step is over: whatever is held is worth nothing."""
        ...


class LastingSums:
    """The sums of one shard in one step; `lasting_sums` makes them."""

    def __init__(self, shard: int, runs: Mapping[str, Sequence[Run]], place: SumsPlace) -> None:
        self._shard = shard
        self._runs = runs
        self._place = place
        self._added: dict[Visit, list[str]] = {}  # parameters by visit; visits in order of appearance, which numbers them

    def add(self, parameter: str, visit: Visit, gradient: torch.Tensor) -> None:
        """Add one micro-batch's gradient from one visit."""
        added = self._added.get(visit)
        if added is None:
            flat = self._place.at(self._shard, len(self._added), fresh=True)
            added = self._added[visit] = []
        else:
            flat = self._place.at(self._shard, list(self._added).index(visit), fresh=False)
        values = gradient.reshape(-1)
        for here, there in self._runs[parameter]:
            put(flat[here], values[there], first=parameter not in added)
        if parameter not in added:
            added.append(parameter)

    def leave(self) -> None:
        """A call's backward is over."""
        self._place.leave(self._shard)

    def finish(self) -> None:
        """Add the visits up in their order and hand the total on; it is zero where no gradient came."""
        flats = {visit: self._place.at(self._shard, number, fresh=False) for number, visit in enumerate(self._added)}
        first, *others = sorted(flats)
        total, touched = flats[first], set(self._added[first])
        for visit in others:
            for parameter in self._added[visit]:
                for here, _ in self._runs[parameter]:
                    put(total[here], flats[visit][here], first=parameter not in touched)
                touched.add(parameter)
        end = 0
        for here in sorted((here for parameter in touched for here, _ in self._runs[parameter]), key=_start):
            total[end : here.start].zero_()
            end = here.stop
        total[end:].zero_()
        self._place.publish(self._shard, total, frozenset(touched))


def lasting_sums(layout: ShardLayout, place: SumsPlace) -> LastingSums:
    """Return sums of the shard to which nothing was added yet."""
    runs: dict[str, list[Run]] = {}
    for section in layout.sections:
        for segment in section.segments if section.trainable else ():
            start, first = section.state_offset + segment.offset, segment.parameter_offset
            run = (slice(start, start + segment.length), slice(first, first + segment.length))
            runs.setdefault(segment.parameter, []).append(run)
    return LastingSums(layout.index, runs, place)


def _start(run: slice) -> int:
    return int(run.start)


def put(sums: torch.Tensor, values: torch.Tensor, *, first: bool) -> None:
    """Add the values; the first ones are copied, for 0 + -0 is not -0."""
    if first:
        sums.copy_(values)
    else:
        sums.add_(values.to(sums.device))
