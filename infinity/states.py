"""Tiers, model states, and state machines: an enum on the object and a table of legal moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from infinity.errors import IllegalTransition


class Tier(str, Enum):
    """Where bytes live. GPU is the compute device; on a machine without one the CPU plays it."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class StateKind(str, Enum):
    """The three model states of ZeRO (Rajbhandari et al., 2020)."""

    PARAM = "params"
    GRAD = "grads"
    OPTIM = "optim"


State = TypeVar("State", bound=Enum)


class Lifecycle(Generic[State]):
    """The state of one thing with a lifetime; `to` makes a legal move and raises IllegalTransition for any other."""

    __slots__ = ("_moves", "name", "state")

    def __init__(self, name: str, initial: State, moves: Mapping[State, tuple[State, ...]]) -> None:
        self.name = name
        self.state = initial
        self._moves = moves

    def to(self, target: State) -> None:
        """Move to `target`, or raise IllegalTransition naming both states."""
        if target not in self._moves[self.state]:
            raise IllegalTransition(f"{self.name}: {self.state.name} cannot become {target.name}.")
        self.state = target
