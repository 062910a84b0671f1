"""An optimizer of torch makes the update: on fp32 masters in host memory, all at once, before `step` returns.

The masters are where the store has them: in the tiles beside bf16 and fp16 weights, which are the masters rounded to nearest
even, and the weights themselves in fp32. What this rank owns of a parameter is one parameter of the optimizer: of its shape
where that is all of it, flat otherwise. The optimizer keeps its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.memory.ledger import Ledger
from infinity.placement.plan import Owner
from infinity.states import Tier
from infinity.store.layout import Section, Segment, ShardLayout, Tile
from infinity.store.store import Store

_FP32_BYTES = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class MasterPiece:
    """What this rank owns of one parameter, as the optimizer sees it."""

    shard: int
    segment: Segment  # where it is, in its section and in the parameter
    shape: tuple[int, ...]  # of the whole parameter
    master: nn.Parameter  # fp32
    weights: torch.Tensor | None  # 1-D, the master rounded; None where the master is the weight
    gradient: torch.Tensor  # 1-D, of the dtype of finished gradients: where they wait

    @property
    def name(self) -> str:
        return self.segment.parameter

    @property
    def is_whole(self) -> bool:
        return self.master.shape == self.shape


class TorchRule:
    """Makes updates with an optimizer of torch whose groups hold `masters` while it steps. One thread."""

    def __init__(
        self, *, optimizer: torch.optim.Optimizer, pieces: Sequence[MasterPiece], masters: Sequence[list[nn.Parameter]],
        ledger: Ledger, settle: Callable[[], None],
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.pieces = tuple(pieces)
        self._masters = masters  # by group
        self._ledger = ledger
        self._settle = settle  # waits until nothing reads the weights in host memory

    def fix(self) -> Callable[[Mapping[int, Mapping[str, int]], float], None]:
        """Return what makes the update; see `UpdateRule`."""
        return self._update

    def _update(self, steps: Mapping[int, Mapping[str, int]], coefficient: float) -> None:
        self._settle()
        touched = [piece for piece in self.pieces if piece.name in steps.get(piece.shard, ())]
        with self._gradients(touched, coefficient), self._over_masters():
            self.optimizer.step()
        for piece in touched:
            if piece.weights is not None:
                piece.weights.copy_(piece.master.detach().view(-1))
        self.measure()

    def state_of(self, piece: MasterPiece) -> Mapping[str, Any]:
        """Return what the optimizer keeps of a piece, by key; empty before its first update."""
        kept: Mapping[str, Any] = self.optimizer.state.get(piece.master, {})
        return kept

    def measure(self) -> None:
        """Book the bytes that the optimizer's state has."""
        tensors = [value for piece in self.pieces for value in self.state_of(piece).values()]
        num_bytes = sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))
        self._ledger.observe(Tier.CPU, Owner.RULE_STATE.value, num_bytes)

    @contextmanager
    def _gradients(self, touched: Sequence[MasterPiece], coefficient: float) -> Iterator[None]:
        """Give the masters their gradients in fp32, times the coefficient, for the time of the block."""
        copied = sum(piece.gradient.numel() for piece in touched if piece.gradient.dtype != torch.float32)
        self._ledger.take(Tier.CPU, Owner.RULE_GRADIENTS.value, copied * _FP32_BYTES)
        try:
            for piece in touched:
                gradient = piece.gradient.to(torch.float32)
                if coefficient != 1.0:
                    gradient.mul_(coefficient)
                piece.master.grad = gradient.view(piece.master.shape)
            yield
        finally:
            for piece in touched:
                piece.master.grad = None
            self._ledger.give(Tier.CPU, Owner.RULE_GRADIENTS.value, copied * _FP32_BYTES)

    @contextmanager
    def _over_masters(self) -> Iterator[None]:
        """Let the groups, which hold the module's parameters for the user to see, hold the masters."""
        groups = self.optimizer.param_groups
        shown = [group["params"] for group in groups]
        for group, masters in zip(groups, self._masters, strict=True):
            group["params"] = masters
        try:
            yield
        finally:
            for group, params in zip(groups, shown, strict=True):
                group["params"] = params


def open_torch_rule(
    *,
    layouts: Sequence[ShardLayout],
    names: Sequence[Sequence[str]],
    store: Store,
    grad_dtype: str,
    make: Callable[[Sequence[Sequence[MasterPiece]]], torch.optim.Optimizer],
    ledger: Ledger,
    settle: Callable[[], None],
) -> TorchRule:
    """Return the rule over what this rank owns; `names` are the parameters of each group, in the user's order.

    `make` gives the optimizer of these pieces by group; its groups are those that the user sees. All weights, tiles and
    gradients of `layouts` are in host memory. Raises ConfigError where `make` does.
    """
    found = {piece.name: piece for layout in layouts for piece in _pieces(layout, store, grad_dtype)}
    by_group = [[found[name] for name in group if name in found] for group in names]
    optimizer = make(by_group)
    masters = [[piece.master for piece in group] for group in by_group]
    pieces = [piece for group in by_group for piece in group]
    return TorchRule(optimizer=optimizer, pieces=pieces, masters=masters, ledger=ledger, settle=settle)


def take_over_state(
    optimizer: torch.optim.Optimizer, own: Mapping[str, nn.Parameter], pieces: Sequence[MasterPiece]
) -> None:
    """Let the state that the optimizer has for the user's `own` parameters, by name, be that of the masters.

    Raises ConfigError for state on the meta device.
    """
    taken: dict[torch.Tensor, Any] = {
        piece.master: {key: part_of_state(key, value, piece) for key, value in optimizer.state[own[piece.name]].items()}
        for piece in pieces
        if own[piece.name] in optimizer.state
    }
    optimizer.state = type(optimizer.state)(dict, taken)


def part_of_state(key: str, value: Any, piece: MasterPiece) -> Any:
    """Return a copy of what a piece has of a parameter's state: its run of elements, or all of what has another shape.

    Raises ConfigError for state on the meta device.
    """
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if value.is_meta:
        raise ConfigError(
            f"optimizer: its state {key} of {piece.name} is on the meta device.",
            remedy="Name the optimizer in the configuration, or give one to a model that has values.",
        )
    if tuple(value.shape) != piece.shape:
        return value.detach().clone()
    first = piece.segment.parameter_offset
    return value.detach().reshape(-1)[first : first + piece.segment.length].clone().view(piece.master.shape)


def _pieces(layout: ShardLayout, store: Store, grad_dtype: str) -> Iterator[MasterPiece]:
    weights, gradients = store.weights(layout.index), store.gradients(layout.index)
    if weights is None or gradients is None:  # nothing to train here
        return
    shapes = {spec.name: spec.shape for spec in layout.specs}
    waiting = gradients.tensor(_DTYPES[grad_dtype], layout.num_state_elements)
    tiles = {tile.section: tile for tile in layout.tiles}
    for number, section in enumerate(layout.sections):
        if not section.trainable:
            continue
        flat = weights.tensor(_DTYPES[section.dtype], section.shard_elements, section.shard_byte_offset)
        masters = _masters(section, tiles.get(number), store, flat)
        for segment in section.segments:
            run = slice(segment.offset, segment.offset + segment.length)
            shape = shapes[segment.parameter]
            own = masters[run]
            yield MasterPiece(
                shard=layout.index,
                segment=segment,
                shape=shape,
                master=nn.Parameter(own.view(shape) if segment.length == prod(shape) else own),
                weights=None if masters is flat else flat[run],
                gradient=waiting[section.state_offset + run.start : section.state_offset + run.stop],
            )


def _masters(section: Section, tile: Tile | None, store: Store, weights: torch.Tensor) -> torch.Tensor:
    """Return the section's masters: its one tile, which stays in memory for good, or the fp32 weights."""
    if tile is None:
        return weights
    buffer = store.fetch_tile(tile).wait().buffer
    return buffer.tensor(torch.float32, tile.num_elements, tile.plane_offset("master"))
