"""Tensors that a model keeps in attributes of its modules while it runs: in vertical order each micro-batch has its own.

What a micro-batch leaves in an attribute (a mask for the blocks, the last hidden state) must be there when its turn comes
again, and when one of its units runs again in backward. Which attributes these are is learnt together with the order of
units. Buffers are no such attributes: they are shared, as in any training loop, and the place for what adds up over steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_TORCHS_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_MISSING = object()
_DEPTH = 3  # how far to look into containers and objects

Place = tuple[nn.Module, str]


def snapshot(module: nn.Module) -> dict[Place, object]:
    """Return every attribute of every module, but for lists of parameters, which recurrent modules keep."""
    return {
        (part, name): value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _TORCHS_OWN and not holds(value, _is_parameter)
    }


class OwnAttributes:
    """The attributes that hold tensors of one micro-batch. Owner: the walk."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()

    def learn(self, before: dict[Place, object], after: dict[Place, object]) -> None:
        """Take those that a run of the model changed, and put back what held tensors before it.

        What the run was the first to make stays, for it may be a cache; but no graph of it does.
        """
        changed = [place for place in before | after if before.get(place, _MISSING) is not after.get(place, _MISSING)]
        held = [place for place in changed if holds(before.get(place), _any)]
        made = [place for place in changed if place not in held and holds(after.get(place), _any)]
        self._places = (*held, *made)
        for place in (*held, *(place for place in made if holds(after.get(place), _has_graph))):
            _put(place, before.get(place, _MISSING))

    def values(self) -> tuple[object, ...]:
        """Return what the attributes hold now."""
        return tuple(vars(module).get(name, _MISSING) for module, name in self._places)

    def put(self, values: tuple[object, ...]) -> None:
        """Let the attributes hold these values."""
        for place, value in zip(self._places, values, strict=True):
            _put(place, value)

    @contextmanager
    def put_back(self, earlier: tuple[object, ...]) -> Iterator[None]:
        """Let the attributes hold earlier values for the time of the block."""
        now = self.values()
        self.put(earlier)
        try:
            yield
        finally:
            self.put(now)


def holds(value: object, wanted: Callable[[torch.Tensor], bool], depth: int = _DEPTH) -> bool:
    """Return whether a value is such a tensor, or a container or object with one in it."""
    if isinstance(value, torch.Tensor):
        return wanted(value)
    return depth > 0 and any(holds(part, wanted, depth - 1) for part in _parts(value))


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _any(_: torch.Tensor) -> bool:
    return True


def _put(place: Place, value: object) -> None:
    module, name = place
    if value is _MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from vars(value).values()
