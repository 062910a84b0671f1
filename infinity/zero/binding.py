"""Puts weights into modules for the time of a call, as leaves whose gradient belongs to that call alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from infinity.zero.absent import AbsentParameter
from infinity.zero.micro_batch import TrackedLeaf, Visit
from infinity.zero.shard import Shard
from infinity.zero.units import Place, Unit


@dataclass(frozen=True, slots=True)
class Binding:
    """One parameter of a unit (or of the root group) with the places inside the unit that hold it."""

    shard: int
    parameter: str
    trainable: bool
    places: tuple[Place, ...]
    outside: nn.Parameter  # what the places hold between calls

    @property
    def absent(self) -> bool:
        """Whether what the places hold between calls has no values."""
        return isinstance(self.outside, AbsentParameter)


def unit_bindings(unit: Unit, shards: Sequence[Shard]) -> tuple[Binding, ...]:
    """Return the bindings of every parameter that has a place inside the unit."""
    inside = {id(part) for part in unit.module.modules()}
    return tuple(
        binding for shard in unit.groups for binding in _bindings(shards[shard], lambda place: id(place.module) in inside)
    )


def root_bindings(units: Sequence[Unit], shards: Sequence[Shard]) -> tuple[Binding, ...]:
    """Return the bindings of the root group in places outside every unit."""
    inside = {id(part) for unit in units for part in unit.module.modules()}
    return tuple(
        binding
        for shard in shards
        if not shard.group.units
        for binding in _bindings(shard, lambda place: id(place.module) not in inside)
    )


def _bindings(shard: Shard, wanted: Callable[[Place], bool]) -> tuple[Binding, ...]:
    trainable = {spec.name: spec.trainable for spec in shard.layout.specs}
    found = []
    for use in shard.group.uses:
        places = tuple(place for place in use.places if wanted(place))
        if places:
            found.append(Binding(shard.index, use.name, trainable[use.name], places, shard.outside[use.name]))
    return tuple(found)


def make_leaves(
    bindings: Sequence[Binding], weights: Mapping[int, Mapping[str, torch.Tensor]], visit: Visit, *, with_grad: bool
) -> tuple[TrackedLeaf, ...]:
    """Return one fresh leaf per binding that shares the weights' memory; `weights` is by shard and parameter name."""
    return tuple(
        TrackedLeaf(
            binding.shard,
            binding.parameter,
            visit,
            nn.Parameter(weights[binding.shard][binding.parameter], requires_grad=with_grad and binding.trainable),
        )
        for binding in bindings
    )


@contextmanager
def installed(bindings: Sequence[Binding], leaves: Sequence[TrackedLeaf]) -> Iterator[None]:
    """Let the modules hold the leaves for the time of the block."""
    install(bindings, [leaf.tensor for leaf in leaves])
    try:
        yield
    finally:
        install(bindings, [binding.outside for binding in bindings])


def install(bindings: Sequence[Binding], tensors: Sequence[nn.Parameter]) -> None:
    """Let the modules hold the tensors, one per binding."""
    for binding, tensor in zip(bindings, tensors, strict=True):
        for place in binding.places:
            if type(place.module).__setattr__ is nn.Module.__setattr__:
                place.module._parameters[place.attribute] = tensor  # what setattr does, without its checks
            else:  # recurrent modules keep a second list of their weights up to date
                setattr(place.module, place.attribute, tensor)
