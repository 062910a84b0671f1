"""The state of a few odd units, known whole, and put into one store for each of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.aio.select import open_engine
from infinity.checkpoint.manifest import CheckpointState, Counters, Fingerprint
from infinity.checkpoint.specs import WEIGHT
from infinity.comm.group import Group
from infinity.engine.exchange import Exchange
from infinity.engine.masters import Masters
from infinity.engine.planes import PLANE_DTYPES, num_parts, read_plane, runs_of, section_of, weights_of, write_plane
from infinity.engine.shard_sources import ShardSource
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.optim.reference import join_master
from infinity.states import Tier
from infinity.store.layout import ParameterSpec, ShardLayout, shard_layout, whole_layout
from infinity.store.shares import ShardShares
from infinity.store.store import Store, open_store
from infinity.store.unit_size import UnitLayouts
from infinity.telemetry.recorder import Recorder
from infinity.zero.shard import TORCH_DTYPES, Residency, Shard
from infinity.zero.units import ParameterGroup


def units(dtype: str) -> tuple[tuple[ParameterSpec, ...], ...]:
    """Parameters over many tiles, over one edge, smaller than any number of ranks, and frozen."""
    return (
        (ParameterSpec("wide", (37, 41), dtype, True), ParameterSpec("bias", (41,), dtype, True)),
        (ParameterSpec("scale", (), dtype, True), ParameterSpec("frozen", (9, 30), dtype, False)),
        (ParameterSpec("head", (1, 256), dtype, True, group=1), ParameterSpec("tail", (130,), dtype, True)),
    )


def layouts(dtype: str, size: int, rank: int, *, split: bool, tile_elements: int = 128) -> list[ShardLayout]:
    """What a rank owns of each unit: its part, or the whole as in stage 0."""
    return [
        shard_layout(number, f"unit{number}", specs, tile_elements=tile_elements, world_size=size, rank=rank)
        if split
        else whole_layout(number, f"unit{number}", specs, tile_elements=tile_elements, world_size=size)
        for number, specs in enumerate(units(dtype))
    ]


State = dict[tuple[str, str], torch.Tensor]  # by (kind, parameter), whole


def state_of(dtype: str, seed: int) -> State:
    """Noise for every weight and plane, in its own dtype and shape."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for layout in layouts(dtype, 1, 0, split=True):
        for spec in layout.specs:
            state[WEIGHT, spec.name] = torch.randn(spec.shape, generator=generator).to(TORCH_DTYPES[dtype])
            for plane in section_of(layout, spec.name).planes:
                noise = torch.randn(spec.shape, generator=generator) * 1000
                state[plane.name, spec.name] = noise.to(PLANE_DTYPES[plane.dtype])
    return state


class WholeWeights:
    """Weights that are gathered already, as the engine's `Weights` gives them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.num_held = 0

    def acquire(self, shard: int) -> Mapping[str, torch.Tensor]:
        self.num_held += 1
        return {name: values for (kind, name), values in self._state.items() if kind == WEIGHT}

    def release(self, shard: int) -> None:
        self.num_held -= 1


@dataclass(frozen=True)
class Rank:
    """What one rank has."""

    store: Store
    layouts: Sequence[ShardLayout]
    exchange: Exchange
    weights: WholeWeights

    @property
    def sources(self) -> list[ShardSource]:
        return [ShardSource(self.shard(layout), self.store, self.weights, self.exchange) for layout in self.layouts]  # type: ignore[arg-type]

    @property
    def masters(self) -> Masters:
        return Masters(self.store, self.weights, self.exchange, Ledger({}))  # type: ignore[arg-type]

    def shard(self, layout: ShardLayout) -> Shard:
        group = ParameterGroup(layout.index, layout.name, (), ())
        return Shard(group, UnitLayouts(layout, layout, layout, gathers_weights=True), Residency.ABSENT, {})

    def fill(self, state: State) -> None:
        """Put this rank's part of a state into its store."""
        for layout in self.layouts:
            for tile in layout.tiles:
                self.store.publish_tile(tile, self.store.new_tile(tile)).wait()
            buffer = self.store.weights(layout.index) or page_buffer(layout.shard_weight_bytes)
            for spec in layout.specs:
                elements = weights_of(layout, section_of(layout, spec.name), buffer)
                for run in runs_of(layout, spec.name):
                    part = state[WEIGHT, spec.name].reshape(-1)[run.parameter_offset : run.parameter_offset + run.length]
                    elements[run.offset : run.offset + run.length] = part
                for plane in section_of(layout, spec.name).planes:
                    write_plane(self.store, layout, spec.name, plane.name, own_part(layout, state, plane.name, spec.name))
            self.store.publish_weights(layout.index, buffer).wait()

    def different(self, state: State) -> list[tuple[str, str]]:
        """Return where this rank's part is another than that of a state."""
        found = []
        for layout in self.layouts:
            buffer = page_buffer(layout.shard_weight_bytes)
            self.store.fetch_weights(layout.index, buffer).wait()
            for spec in layout.specs:
                elements = weights_of(layout, section_of(layout, spec.name), buffer)
                own = [elements[run.offset : run.offset + run.length] for run in runs_of(layout, spec.name)]
                if not torch.equal(torch.cat([elements[:0], *own]), own_part(layout, state, WEIGHT, spec.name)):
                    found.append((WEIGHT, spec.name))
                for plane in section_of(layout, spec.name).planes:
                    kept = read_plane(self.store, layout, spec.name, plane.name)
                    if not torch.equal(kept, own_part(layout, state, plane.name, spec.name)):
                        found.append((plane.name, spec.name))
        return found


def own_part(layout: ShardLayout, state: State, kind: str, parameter: str) -> torch.Tensor:
    flat = state[kind, parameter].reshape(-1)
    runs = runs_of(layout, parameter)
    return torch.cat([flat[:0], *(flat[run.parameter_offset : run.parameter_offset + run.length] for run in runs)])


def page_buffer(num_bytes: int) -> Buffer:
    return open_arena(num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="test", pin=False).buffer


def open_rank(group: Group, dtype: str, state: State, nvme: Path | None, opened: ExitStack, *, split: bool = True) -> Rank:
    """Open a rank's store, everything on NVMe where a directory is given, and fill it with its part."""
    owned = layouts(dtype, group.size, group.rank, split=split)
    tier = Tier.NVME if nvme is not None else Tier.CPU
    io = open_engine("threads", queue_depth=4, block_bytes=1 << 16)
    opened.callback(io.close)
    store = open_store(
        directories=[nvme] if nvme is not None else [], engine=io, ledger=Ledger({}), recorder=Recorder(),
        run_name=f"of-{group.size}-rank{group.rank}", pin=False, num_tile_slots=2, grad_element_bytes=2,
        shards=[
            (layout, ShardShares(tier, tier, frozenset() if nvme else frozenset(tile.index for tile in layout.tiles)))
            for layout in owned
        ],
    )  # fmt: skip
    opened.callback(store.close)
    rank = Rank(store, owned, Exchange(group, torch.device("cpu")), WholeWeights(state))
    rank.fill(state)
    return rank


def checkpoint_state(step: int) -> CheckpointState:
    return CheckpointState(Fingerprint((), {}), "bf16", Counters(step, step, 0, step, {}), {"tokens": 1}, None)


def master_of(state: State, spec: ParameterSpec) -> torch.Tensor:
    """Return the whole master of a parameter from what a state has of it."""
    weight = state[WEIGHT, spec.name]
    if spec.trainable and ("master_low", spec.name) in state:
        return join_master(weight, state["master_low", spec.name])
    return state.get(("master", spec.name), weight.float())


Job = Callable[[Rank], Any]


def require_split(rank: Rank, size: int) -> None:
    """Fail unless the units really lie on several ranks, so that a test means what it says."""
    assert [num_parts(layout) for layout in rank.layouts] == [size] * len(rank.layouts)
