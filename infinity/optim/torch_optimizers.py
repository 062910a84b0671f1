"""Which optimizers of torch make updates here, what they keep for each element, and how one is made by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.config.optimizer import num_values
from infinity.errors import ConfigError
from infinity.optim.lion import Lion

# Their steps cannot be taken from a gradient that is finished and dense.
_REFUSED = {"LBFGS": "runs the model again inside a step", "SparseAdam": "takes nothing but sparse gradients"}
# They look at rows, columns or norms of a parameter, so that a rank needs the whole of it.
_NOT_ELEMENTWISE = ("Adafactor", "Muon")


def make_torch_optimizer(
    name: str, groups: Sequence[Mapping[str, Any]], hyper_parameters: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration calls `name`, over these groups."""
    kind: Any = Lion if name == "Lion" else getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind([dict(group) for group in groups], **hyper_parameters)
    return made


def require_usable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that no gradient summed beforehand can serve."""
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise ConfigError(
            f"optimizer is a {name}, which {_REFUSED[name]}.",
            remedy="Every other optimizer of torch is supported: with all state in memory, Adam and AdamW on every tier.",
        )


def require_parts(name: str, *, is_known: bool) -> str | None:
    """Return what is to be said of an optimizer that sees parts of parameters; None where it treats each element by itself.

    Raises ConfigError for one of torch's that needs whole parameters. `is_known`: whether the class is torch's or ours.
    """
    if not is_known:
        return f"optimizer: in stages 1 to 3 {name} gets the part of each parameter that a rank owns, as one flat tensor."
    if name in _NOT_ELEMENTWISE:
        raise ConfigError(
            f"optimizer is {name}, which needs whole parameters: in stages 1 to 3 a rank has its part of each.",
            remedy="Use stage 0, or an optimizer that treats every element by itself, such as AdamW, SGD or Lion.",
        )
    return None


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is one of torch.optim or of infinity."""
    return type(optimizer) in (Lion, getattr(torch.optim, type(optimizer).__name__, None))


def values_an_element(optimizer: torch.optim.Optimizer) -> int:
    """Return how many fp32 values the optimizer keeps for each element; 0 for a class that is not known."""
    if not is_known(optimizer):
        return 0
    return max(num_values(type(optimizer).__name__, group) for group in optimizer.param_groups)
