"""The full and local states of a parameter under the names that ZeRO's users know: `infinity.utils.safe_get_full_grad(p)`.

All take a parameter of `engine.module`. What they return is a copy in host memory, fp32. Gradients are those of the step
that `engine.step()` takes next, averaged over its micro-batches and unclipped: to be read between the last backward and
`step()`. *Full* values have the parameter's shape; *local* ones are the elements that this rank owns, 1-D. None stands for
what a parameter does not have: no gradient in this step, no optimizer state where it is frozen.

Over several ranks every rank makes the same calls in the same order; each takes what it owns from the full value that it is
given, so that all have to give the same.

All raise ModelError for a parameter that no open engine has and for a value of another shape, and IllegalTransition at a
time when there is nothing right to say: see `zero.access.ParameterStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from infinity.not_offered import missing
from infinity.zero.access import states_of

__all__ = [
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]  # fmt: skip

_MASTER = "fp32"


def __getattr__(name: str) -> object:
    raise missing("infinity.utils", name)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master; the weight of a frozen parameter."""
    return states_of(param).get(_MASTER, local=False)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value` the master; the compute weight follows."""
    states_of(param).set(_MASTER, value, local=False)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return "exp_avg" or "exp_avg_sq" (or "fp32", the master)."""
    return states_of(param).get(optim_state_key, local=False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace "exp_avg" or "exp_avg_sq" (or "fp32", the master)."""
    states_of(param).set(optim_state_key, value, local=False)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the next `step` uses."""
    return states_of(param).get_gradient(local=False)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient that the next `step` uses: norm, finiteness and update see the new one."""
    states_of(param).set_gradient(value, local=False)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter by `update_func(gradient, parameter)`; those without one keep none."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master."""
    return states_of(param).get(_MASTER, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value` this rank's part of the master."""
    states_of(param).set(_MASTER, value, local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of "exp_avg" or "exp_avg_sq"."""
    return states_of(param).get(optim_state_key, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of "exp_avg" or "exp_avg_sq"."""
    states_of(param).set(optim_state_key, value, local=True)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the gradient that the next `step` uses."""
    return states_of(param).get_gradient(local=True)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient that the next `step` uses."""
    states_of(param).set_gradient(value, local=True)
