"""How a micro-batch is given to a module, and how the loss is found in what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.errors import IllegalTransition, ModelError

# Gets the module's output and the micro-batch; returns a scalar tensor.
LossFunction = Callable[[Any, Any], torch.Tensor]


def listed(micro_batches: Iterable[Any]) -> tuple[Any, ...]:
    """Return the micro-batches of a step. Raises IllegalTransition for none, and for what is no list of them."""
    if not isinstance(micro_batches, Iterable) or isinstance(micro_batches, torch.Tensor | Mapping | str):
        raise IllegalTransition(
            f"train_batch got a {type(micro_batches).__name__} instead of a list of micro-batches.",
            remedy="Give [micro_batch, ...], also for a single one.",
        )
    listed = tuple(micro_batches)
    if not listed:
        raise IllegalTransition("train_batch: there are no micro-batches.", remedy="Give at least one.")
    return listed


def call_module(module: nn.Module, micro_batch: Any) -> Any:
    """Call the module with a dict (keyword arguments), a tuple or list (positional) or one value."""
    if isinstance(micro_batch, Mapping):
        return module(**micro_batch)
    if isinstance(micro_batch, tuple | list):
        return module(*micro_batch)
    return module(micro_batch)


def find_loss(output: Any, micro_batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """Return the scalar loss. Raises ModelError when there is none."""
    loss = loss_fn(output, micro_batch) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ModelError(
            f"The module returned {got}; a step needs one loss.",
            remedy="Return a scalar loss, an output with .loss, or give loss_fn=(output, micro_batch) -> loss.",
        )
    return loss


def coefficients(
    weights: Sequence[float] | None, num_micro_batches: int, num_ranks: int, total_of: Callable[[Sequence[float]], float]
) -> list[float]:
    """Return each micro-batch's share of the mean loss of all ranks: equal, or in proportion to `weights` (token counts).

    `total_of` returns the sum of the weights of all ranks.
    """
    if weights is None:
        return [1.0 / (num_micro_batches * num_ranks)] * num_micro_batches
    fit = len(weights) == num_micro_batches and all(0 <= weight < math.inf for weight in weights)
    total = total_of(weights) if fit else 0.0
    if total <= 0:
        raise ModelError(
            f"train_batch: weights {list(weights)} do not fit {num_micro_batches} micro-batches.",
            remedy="Give one number of at least 0 for each, not all 0.",
        )
    return [weight / total for weight in weights]


def on_device(values: Any, device: torch.device) -> Any:
    """Return what a micro-batch holds with its tensors on the compute device."""
    if device.type == "cpu":
        return values
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)
