"""Takes the tensors out of nested values (a call's arguments, its result), so that others can be put in their places.

What torch's pytree knows (lists, dicts, tuples, the outputs of transformers) and dataclasses are looked into; any other
object stays whole. A tensor that occurs twice is taken out once, for a unit may ask whether two arguments are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """Stands where a tensor was."""

    number: int


@dataclass(frozen=True, slots=True)
class _Record:
    """Stands where a dataclass was."""

    kind: type
    attributes: Structure  # of a dict


@dataclass(frozen=True, slots=True)
class Structure:
    """A value without its tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with these tensors, given in the order in which they were taken out."""
        return tree_unflatten([_filled(leaf, tensors) for leaf in self.leaves], self.spec)

    def same(self, other: Structure) -> bool:
        """Return whether both have the same shape and the same objects in it."""
        return self.spec == other.spec and all(map(_same, self.leaves, other.leaves))


def take_apart(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """Return the structure of `value` and its tensors, each once, in order of first occurrence."""
    tensors: list[torch.Tensor] = []
    return _stripped(value, tensors, {}), tensors


def _stripped(value: Any, tensors: list[torch.Tensor], numbers: dict[int, int]) -> Structure:
    leaves, spec = tree_flatten(value)
    return Structure(spec, tuple(_stripped_leaf(leaf, tensors, numbers) for leaf in leaves))


def _stripped_leaf(leaf: Any, tensors: list[torch.Tensor], numbers: dict[int, int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        number = numbers.setdefault(id(leaf), len(tensors))
        if number == len(tensors):
            tensors.append(leaf)
        return _TensorPlace(number)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        names = {field.name for field in fields(leaf)}.union(getattr(leaf, "__dict__", ()))
        attributes = {name: getattr(leaf, name) for name in sorted(names) if hasattr(leaf, name)}
        return _Record(type(leaf), _stripped(attributes, tensors, numbers))
    return leaf


def _filled(leaf: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(leaf, _TensorPlace):
        return tensors[leaf.number]
    if isinstance(leaf, _Record):
        record: Any = object.__new__(leaf.kind)
        for name, value in leaf.attributes.fill(tensors).items():
            object.__setattr__(record, name, value)  # frozen ones too
        return record
    return leaf


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _TensorPlace):
        return bool(one == other)
    if isinstance(one, _Record):
        return isinstance(other, _Record) and one.kind is other.kind and one.attributes.same(other.attributes)
    return one is other
