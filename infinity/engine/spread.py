"""Stage 0 over several ranks: each rank rounds and measures its part of a gradient, and all ranks get the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.comm.group import Group
from infinity.handles import AllOf, Handle
from infinity.store.unit_size import UnitLayouts


class GradientSpread:
    """The parts of one shard's gradient at a time. Every rank makes the same calls in the same order."""

    def __init__(self, group: Group, layouts: Sequence[UnitLayouts], part: torch.Tensor) -> None:
        self._group = group
        self._layouts = layouts
        self._part = part  # grad_dtype [elements of the largest part], on the compute device

    def part(self, shard: int) -> torch.Tensor:
        """Return the place for this rank's part, 1-D of grad_dtype: free when `send` has returned."""
        return self._part[: self._layouts[shard].part.num_state_elements]

    def send(self, shard: int, whole: torch.Tensor) -> Handle[None]:
        """Begin to fill `whole`, the shard's gradient, with every rank's part."""
        what = f"reduced gradient of {self._layouts[shard].whole.name}"
        sections, start = [whole[run] for run in self._layouts[shard].reduced_runs], 0
        for flat in sections:
            own = self._own(flat)
            own.copy_(self._part[start : start + own.numel()])
            start += own.numel()
        return AllOf([self._group.all_gather(self._own(flat), flat, what=what) for flat in sections])

    def collect(self, shard: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient that is there, as a copy."""
        return torch.cat([self._own(whole[run]) for run in self._layouts[shard].reduced_runs])

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(self._group.size)[self._group.rank]
