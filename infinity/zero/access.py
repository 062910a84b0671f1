"""From a parameter of the user's module to the states behind it: the engine leaves a handle on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from infinity.errors import ModelError

_ATTRIBUTE = "_infinity_states"


class ParameterStates(Protocol):
    """The states of one parameter, wherever they live. Tensors are copies in host memory unless said otherwise.

    *Full* values have the parameter's shape, *local* ones are the elements that this rank owns, 1-D and in their order.
    Over several ranks every rank makes the same calls in the same order; `set` takes from each what that rank owns. Every
    call makes pending updates first. Raises IllegalTransition while the engine's module runs.
    """

    @property
    def name(self) -> str: ...

    def hold_weight(self) -> torch.Tensor:
        """Return the weight in the dtype and on the device of compute; its memory is booked until `let_go`."""
        ...

    def let_go(self) -> None: ...

    def take_from(self, rank: int, weight: torch.Tensor) -> None:
        """Fill `weight`, of the parameter's shape, with what rank `rank` gives."""
        ...

    def on_every_rank(self, is_so: bool) -> list[bool]:
        """Return what every rank says, in rank order."""
        ...

    def get(self, state: str, *, local: bool) -> torch.Tensor | None:
        """Return "fp32" (the master), or a plane of optimizer state such as "exp_avg"; None where it is frozen."""
        ...

    def set(self, state: str, value: torch.Tensor, *, local: bool) -> None:
        """Replace it. Raises ModelError for another shape, and IllegalTransition while a backward is to come."""
        ...

    def optimizer_state(self) -> dict[str, object]:
        """Return everything that the optimizer keeps beside the master, by key, full; empty where there is nothing."""
        ...

    def replace_optimizer_state(self, state: Mapping[str, object]) -> None:
        """Make `state`, as `optimizer_state` returns it, the parameter's. Raises ModelError for that of another."""
        ...

    def get_gradient(self, *, local: bool) -> torch.Tensor | None:
        """Return the finished gradient of the step that `step` takes next, fp32; None where backward gave none."""
        ...

    def set_gradient(self, value: torch.Tensor, *, local: bool) -> None: ...


def leave_states(parameter: nn.Parameter, states: ParameterStates) -> None:
    """Let `states_of` find the states of this parameter."""
    setattr(parameter, _ATTRIBUTE, states)


def forget_states(parameter: nn.Parameter) -> None:
    """The engine is closed: nothing is behind the parameter any more."""
    if hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)


def find_states(parameter: nn.Parameter) -> ParameterStates | None:
    """Return the states behind a parameter; None for one that no open engine has."""
    found: ParameterStates | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def states_of(parameter: nn.Parameter) -> ParameterStates:
    """Return the states behind a parameter. Raises ModelError for one that no open engine has."""
    states = find_states(parameter)
    if states is None:
        raise ModelError(
            f"A {type(parameter).__name__} was given that belongs to no open engine.",
            remedy="Give a parameter of engine.module, as engine.module.named_parameters() has it.",
        )
    return states
