"""The gate that differentiable outputs of a forward pass: it says when their backward begins, and scales its gradients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only


class GateKeeper(Protocol):
    """Hears of every backward before anything else of it runs."""

    def backward_begins(self, step_number: int) -> float:
        """Return what the gradients are multiplied by; `step_number` is what `gated` got. An exception ends the backward."""
        ...


def gated(output: Any, keeper: GateKeeper, step_number: int) -> Any:
    """Return the output, whatever holds its tensors, with a gate before every tensor that requires grad."""
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, output)
    wanted = [tensor for tensor in found if tensor.requires_grad]
    if not wanted:
        return output
    passed = dict(zip(map(id, wanted), _Gate.apply(keeper, step_number, *wanted), strict=True))  # type: ignore[no-untyped-call]
    return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), output)


class _Gate(torch.autograd.Function):
    """Identity in forward; in backward it tells the keeper and scales the gradients."""

    @staticmethod
    def forward(ctx: Any, keeper: GateKeeper, step_number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.keeper, ctx.step_number = keeper, step_number
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        factor = ctx.keeper.backward_begins(ctx.step_number)
        return None, None, *(None if gradient is None else gradient * factor for gradient in gradients)
