"""The states that an optimizer of torch keeps itself: read and replaced by parameter, saved and loaded with its unit.

A checkpoint holds `optimizer.<key>/<parameter>`: in the parameter's shape what the optimizer has for each element, in its
own shape anything else (a step count), and as `optimizer.<key>.number` what is a plain number of Python.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.checkpoint.reader import Checkpoint
from infinity.checkpoint.sources import HostData, UnitSource
from infinity.checkpoint.specs import TensorSpec, tensor_name
from infinity.comm.group import Json
from infinity.comm.verdict import together
from infinity.engine.exchange import Exchange
from infinity.engine.planes import num_parts, part_of, runs_of
from infinity.errors import CheckpointError, CheckpointMismatch, ModelError
from infinity.optim.torch_rule import MasterPiece, TorchRule, part_of_state
from infinity.store.layout import ParameterSpec, ShardLayout

_PREFIX, _NUMBER = "optimizer.", ".number"
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_ADAM = "infinity's Adam"

# By parameter and key of a state: the tensor that a checkpoint holds of it.
SavedStates = Mapping[str, Mapping[str, TensorSpec]]


class KeptStates:
    """What the optimizer of a rule has; without a rule tiles hold everything, and nothing is here. Owner: the engine."""

    def __init__(self, rule: TorchRule | None, exchange: Exchange) -> None:
        self._rule = rule
        self._exchange = exchange
        self._pieces = {piece.name: piece for piece in rule.pieces} if rule is not None else {}

    @property
    def optimizer_name(self) -> str | None:
        """The class of the optimizer; None for infinity's Adam."""
        return type(self._rule.optimizer).__name__ if self._rule is not None else None

    # One parameter's

    def get(self, layout: ShardLayout, spec: ParameterSpec, key: str, *, local: bool) -> torch.Tensor | None:
        """Return a copy of a state that has a value for each element: this rank's own, 1-D, or all in the parameter's shape.

        None where the optimizer has none yet. Every rank asks for the whole. Raises ModelError for a key of no parameter.
        """
        own = self._elements(spec.name).get(key)
        known, found = self._known_keys(), own is not None
        if not local:
            said: Any = self._exchange.group.gather([sorted(known), found], what=f"states of {spec.name}")
            known = {key for theirs, _ in said for key in theirs}
            found = any(has for _, has in said)
        if known and key not in known:
            raise ModelError(f"There is no optimizer state {key!r}.", remedy=f"There are fp32, {', '.join(sorted(known))}.")
        if not found:
            return None
        values = torch.empty(0) if own is None else own.detach().reshape(-1).to("cpu", copy=True)
        if local:
            return values
        return self._exchange.whole(layout, spec.name, values, what=key).view(spec.shape)

    def put(self, parameter: str, key: str, values: torch.Tensor) -> None:
        """Replace this rank's elements, 1-D. Raises ModelError where the optimizer has none."""
        own = self._elements(parameter).get(key)
        if own is None and parameter in self._pieces:
            raise ModelError(
                f"The optimizer has no {key} of {parameter} yet.", remedy="Set states after a step that gave it a gradient."
            )
        if own is not None:
            own.detach().copy_(values.view(own.shape))

    def everything(self, layout: ShardLayout, spec: ParameterSpec) -> dict[str, object]:
        """Return copies of all states of a parameter, whole. Every rank calls it. Raises CheckpointError as `saved` does."""
        saved = self.saved((spec.name,))
        found: dict[str, object] = {}
        for (key, tensor), (_, _, values) in zip(
            saved.get(spec.name, {}).items(), self.pieces(layout, (spec,), saved), strict=True
        ):
            value = values.view(tensor.shape).clone()
            found[key] = value.item() if tensor.name.partition("/")[0].endswith(_NUMBER) else value
        return found

    def replace(self, spec: ParameterSpec, state: Mapping[str, object]) -> None:
        """Make these, as `everything` returns them, the states of a parameter."""
        piece = self._pieces.get(spec.name)
        if piece is not None and self._rule is not None:
            own = {key: part_of_state(key, value, piece) for key, value in state.items()}
            self._rule.optimizer.state[piece.master] = own

    # Checkpoints

    def saved(self, parameters: Collection[str] | None = None) -> SavedStates:
        """Return what a checkpoint is to hold, of these parameters or all; some ranks alone may know. Every rank calls it.

        Raises CheckpointError, on every rank, for a state of any rank that no file can hold.
        """
        if self._rule is None:
            return {}
        what = "states of the optimizer"
        with together(self._exchange.group, what=what):  # which parts a rank has decides what it cannot save
            mine = self._described(self._rule, parameters)
        found: dict[str, dict[str, TensorSpec]] = {}
        said: Any = self._exchange.group.gather(mine, what=what)
        for theirs in said:
            for name, described in theirs.items():
                specs = found.setdefault(name, {})
                for key, (kind, dtype, shape) in described.items():
                    specs.setdefault(key, TensorSpec(tensor_name(kind, name), dtype, tuple(shape)))
        return found

    def beside(self, unit: UnitSource, layout: ShardLayout, saved: SavedStates) -> UnitSource:
        """Return the unit with these states."""
        return _UnitWithStates(unit, layout, saved, self) if self._rule is not None else unit

    def pieces(
        self, layout: ShardLayout, specs: Sequence[ParameterSpec], saved: SavedStates
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the states of a unit's parameters, each whole and 1-D; every rank runs through them."""
        for spec in specs:
            for key, tensor in saved.get(spec.name, {}).items():
                piece = self._pieces.get(spec.name)
                value = self._state(piece).get(key) if piece is not None else None
                own = _as_tensor(value, tensor).detach().reshape(-1).cpu()
                if tensor.shape == spec.shape:
                    yield tensor.name, 0, self._exchange.whole(layout, spec.name, own, what=tensor.name)
                    continue
                self._exchange.broadcast(own.view(torch.uint8), source=_first_owner(layout, spec.name), what=tensor.name)
                yield tensor.name, 0, own

    def require_same(self, recorded: str | None, where: str) -> None:
        """Raise CheckpointMismatch where another optimizer wrote a checkpoint."""
        if recorded != self.optimizer_name:
            raise CheckpointMismatch(
                f"{where} was written with the optimizer {recorded or _ADAM}; this run has {self.optimizer_name or _ADAM}.",
                remedy="Resume with the optimizer that it was written with.",
            )

    def load(self, checkpoint: Checkpoint) -> None:
        """Replace all of them by a checkpoint's: what it has no state of was never updated."""
        if self._rule is None:
            return
        kinds = {kind: dict(checkpoint.specs(kind)) for kind in sorted(checkpoint.kinds()) if kind.startswith(_PREFIX)}
        for piece in self._rule.pieces:
            state: dict[str, Any] = {}
            for kind, specs in kinds.items():
                if piece.name in specs:
                    key = kind.removeprefix(_PREFIX).removesuffix(_NUMBER)
                    value = _read(checkpoint, kind, specs[piece.name], piece)
                    state[key] = value.item() if kind.endswith(_NUMBER) else value
            self._rule.optimizer.state[piece.master] = state
        self._rule.measure()

    def _described(self, rule: TorchRule, parameters: Collection[str] | None) -> dict[str, Json]:
        """Return this rank's states by parameter and key, as a checkpoint has them."""
        beside = rule.optimizer.state.keys() - {piece.master for piece in self._pieces.values()}
        if beside:
            raise CheckpointError(
                f"The optimizer keeps {len(beside)} states that belong to no parameter, such as {next(iter(beside))!r}.",
                remedy="What it keeps by parameter, and numbers in its groups, can be saved.",
            )
        return {
            name: {key: _described(key, value, piece) for key, value in self._state(piece).items() if value is not None}
            for name, piece in self._pieces.items()
            if parameters is None or name in parameters
        }

    def _state(self, piece: MasterPiece) -> Mapping[str, Any]:
        return self._rule.state_of(piece) if self._rule is not None else {}

    def _elements(self, parameter: str) -> dict[str, torch.Tensor]:
        piece = self._pieces.get(parameter)
        if piece is None:
            return {}
        state = self._state(piece).items()
        return {key: value for key, value in state if _is_elementwise(value, piece)}

    def _known_keys(self) -> set[str]:
        return {key for name in self._pieces for key in self._elements(name)}


@dataclass(frozen=True, slots=True)
class _UnitWithStates:
    """A UnitSource."""

    unit: UnitSource
    layout: ShardLayout
    saved: SavedStates
    states: KeptStates

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def specs(self) -> Sequence[TensorSpec]:
        kept = [tensor for spec in self.layout.specs for tensor in self.saved.get(spec.name, {}).values()]
        return [*self.unit.specs, *kept]

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        yield from self.unit.pieces()
        yield from self.states.pieces(self.layout, self.layout.specs, self.saved)


def _is_elementwise(value: Any, piece: MasterPiece) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == piece.master.shape and value.is_floating_point()


def _described(key: str, value: Any, piece: MasterPiece) -> list[Json]:
    """Return kind, dtype and shape of what a checkpoint holds of a state."""
    if type(value) in _NUMBERS:
        return [f"{_PREFIX}{key}{_NUMBER}", _name(_NUMBERS[type(value)]), []]
    if isinstance(value, torch.Tensor):
        if value.shape == piece.master.shape:
            return [f"{_PREFIX}{key}", _name(value.dtype), list(piece.shape)]
        if piece.is_whole or value.ndim == 0:
            return [f"{_PREFIX}{key}", _name(value.dtype), list(value.shape)]
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise CheckpointError(
        f"The optimizer's state {key} of {piece.name} is a {type(value).__name__}{shape}, which no checkpoint holds.",
        remedy="Tensors and numbers can be saved; in stages 1 to 3 tensors with a value for each element.",
    )


def _as_tensor(value: Any, spec: TensorSpec) -> torch.Tensor:
    """Return a state as its tensor; where this rank has none, what another fills, or no elements."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if isinstance(value, torch.Tensor):
        return value
    return torch.zeros(spec.shape, dtype=dtype) if value is None else torch.tensor(value, dtype=dtype)


def _first_owner(layout: ShardLayout, parameter: str) -> int:
    """Return the rank that owns a parameter's first element; 0 where every rank has the whole."""
    ranks = range(num_parts(layout))
    owners = [rank for rank in ranks if any(not run.parameter_offset for run in runs_of(part_of(layout, rank), parameter))]
    return owners[0] if len(ranks) > 1 and owners else 0


def _read(checkpoint: Checkpoint, kind: str, spec: TensorSpec, piece: MasterPiece) -> torch.Tensor:
    is_elementwise = spec.shape == piece.shape
    numel = piece.segment.length if is_elementwise else spec.numel
    into = torch.empty(numel, dtype=getattr(torch, spec.dtype))
    checkpoint.read(piece.name, kind, piece.segment.parameter_offset if is_elementwise else 0, numel, into)
    return into.view(piece.master.shape if is_elementwise else spec.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
