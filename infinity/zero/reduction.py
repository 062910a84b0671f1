"""Gradients over several ranks: a unit's sum is added up over ranks, and this rank's part goes on to where it waits.

Each element is summed in the order of the ranks, whatever the stage (docs/numerics.md). One unit is reduced while
the next one's backward runs. The mean over ranks is in what backward began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.comm.group import Group
from infinity.handles import AllOf
from infinity.store.unit_size import UnitLayouts
from infinity.zero.gradients import FinalRun, fill
from infinity.zero.lasting_sums import SumsPlace, put


class PartTarget(Protocol):
    """Takes this rank's part of final gradients."""

    def publish(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """As GradientTarget's; the runs lie in the rank's part, and all of it is there. `touched` on this rank."""
        ...


class PartSums:
    """fp32 sums over micro-batches of this rank's parts. They wait in a `SumsPlace`, one for each shard."""

    def __init__(self, place: SumsPlace) -> None:
        self._place = place
        self._touched: dict[int, frozenset[str]] = {}

    def publish(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """Add one micro-batch's part."""
        is_first = shard not in self._touched
        flat = self._place.at(shard, 0, fresh=is_first)
        for run in runs:
            put(flat[run.start : run.start + run.values.numel()], run.values, first=is_first)
        self._place.leave(shard)
        self._touched[shard] = self._touched.get(shard, frozenset()) | touched

    def finish(self) -> None:
        """Hand the sums on, in the order in which they came."""
        for shard, touched in self._touched.items():
            self._place.publish(shard, self._place.at(shard, 0, fresh=False), touched)
        self.discard()

    def discard(self) -> None:
        """Forget them."""
        self._touched = {}


@dataclass(frozen=True, slots=True)
class _UnderWay:
    shard: int
    touched: frozenset[str]
    reduced: AllOf


class RankReduction:
    """A GradientTarget that reduces. One thread; every rank publishes the same shards in the same order."""

    def __init__(
        self,
        *,
        group: Group,
        layouts: Sequence[UnitLayouts],
        flat: torch.Tensor,
        target: PartTarget,
        part_sums: PartSums | None,
    ) -> None:
        self._group = group
        self._layouts = layouts
        self._flat = flat  # [elements of the largest whole unit] in the dtype of communication, on the compute device
        self._target = target
        self._part_sums = part_sums  # where every micro-batch is reduced by itself
        self._sums_up = False  # micro-batches, in this step
        self._under_way: _UnderWay | None = None

    @property
    def sums_micro_batches(self) -> bool:
        """Whether every micro-batch's gradient is reduced by itself."""
        return self._part_sums is not None

    def begin_micro_batches(self) -> None:
        """Sum up what is published from now on, until `finish`."""
        self._sums_up = True

    def publish(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """Begin to reduce a unit's gradient, whose runs are free when this returns."""
        self.settle()
        layouts = self._layouts[shard]
        whole = layouts.whole
        flat = self._flat[: whole.num_state_elements]
        fill(flat, runs)
        handles = [
            self._group.reduce_scatter(section, self._own(section), what=f"gradient of {whole.name}")
            for section in (flat[run] for run in layouts.reduced_runs)
        ]
        self._under_way = _UnderWay(shard, touched, AllOf(handles))

    def settle(self) -> None:
        """Let the part of the unit that is being reduced go on."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        under_way.reduced.wait()
        runs, start = [], 0
        for run in self._layouts[under_way.shard].reduced_runs:
            own = self._own(self._flat[run])
            runs.append(FinalRun(start, own))
            start += own.numel()
        target = self._part_sums if self._sums_up and self._part_sums is not None else self._target
        target.publish(under_way.shard, runs, under_way.touched)

    def finish(self) -> None:
        """Every unit was published."""
        self.settle()
        if self._sums_up and self._part_sums is not None:
            self._part_sums.finish()
        self._sums_up = False

    def discard(self) -> None:
        """Forget the gradients of a step that every rank gives up."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.reduced.wait()
        self._sums_up = False
        if self._part_sums is not None:
            self._part_sums.discard()

    def _own(self, section: torch.Tensor) -> torch.Tensor:
        return section.chunk(self._group.size)[self._group.rank]
