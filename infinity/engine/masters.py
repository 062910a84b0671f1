"""The fp32 master of a parameter, put together from its weight and what the tiles hold of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.engine.exchange import Exchange
from infinity.engine.planes import num_parts, read_plane, runs_of, section_of, weights_of
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.optim.reference import join_master
from infinity.states import Tier
from infinity.store.layout import ParameterSpec, ShardLayout
from infinity.store.store import Store
from infinity.zero.shard import Shard
from infinity.zero.weights import Weights

OWNER = "gathered parameters"


@dataclass(frozen=True, slots=True)
class Masters:
    """Reads masters of a drained engine: copies in host memory, fp32; the weight itself where a parameter is frozen."""

    store: Store
    weights: Weights
    exchange: Exchange
    ledger: Ledger

    def whole(self, shard: Shard, spec: ParameterSpec) -> torch.Tensor:
        """Return all of it in the parameter's shape. Every rank calls it."""
        with held(self.weights, shard, spec) as weight:
            plane = section_of(shard.layout, spec.name).master_plane
            if plane is None:
                return weight.to(torch.float32, copy=True)
            own = read_plane(self.store, shard.layout, spec.name, plane.name)
            kept = self.exchange.whole(shard.layout, spec.name, own, what=plane.name).view(weight.shape)
            return join_master(weight, kept) if plane.name == "master_low" else kept

    def own(self, shard: Shard, spec: ParameterSpec) -> torch.Tensor:
        """Return the elements that this rank owns, 1-D; where it has a part, no other rank is asked. Raises OverBudget."""
        if num_parts(shard.layout) == 1:
            return self.whole(shard, spec).reshape(-1)
        plane = section_of(shard.layout, spec.name).master_plane
        if plane is not None:
            kept = read_plane(self.store, shard.layout, spec.name, plane.name)
            return join_master(self._own_weights(shard, spec), kept) if plane.name == "master_low" else kept
        return self._own_weights(shard, spec).to(torch.float32)

    def _own_weights(self, shard: Shard, spec: ParameterSpec) -> torch.Tensor:
        layout, resident = shard.layout, self.store.weights(shard.index)
        if resident is not None:
            return _elements(layout, spec.name, resident)
        # Not through a slot: what is in the slots has to be the same on every rank.
        with open_arena(layout.shard_weight_bytes, ledger=self.ledger, tier=Tier.CPU, owner=OWNER, pin=False) as arena:
            self.store.fetch_weights(layout.index, arena.buffer).wait()
            return _elements(layout, spec.name, arena.buffer)


def _elements(layout: ShardLayout, parameter: str, weights: Buffer) -> torch.Tensor:
    section = weights_of(layout, section_of(layout, parameter), weights)
    return torch.cat([section[:0], *(section[run.offset : run.offset + run.length] for run in runs_of(layout, parameter))])


@contextmanager
def held(weights: Weights, shard: Shard, spec: ParameterSpec) -> Iterator[torch.Tensor]:
    """Give one parameter's weight on the CPU for the time of the block; released, its slot may be filled at once."""
    views = weights.acquire(shard.index)
    try:
        yield views[spec.name].detach().cpu()
    finally:
        weights.release(shard.index)
