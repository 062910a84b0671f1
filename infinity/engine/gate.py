"""What the engine puts into the user's graph: a gate behind each forward pass, and the scale of a loss.

The gate passes the outputs of the module; it says when their backward begins, and scales its gradients.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from infinity.engine.passes import ForwardPass


class GateKeeper(Protocol):
    """Hears of every backward before anything else of it runs."""

    def backward_begins(self, forward: ForwardPass) -> float:
        """Return what the gradients are multiplied by; `forward` is what `gated` got. An exception ends the backward."""
        ...

    def loss_begins(self) -> float:
        """Return what the gradient of a scaled loss is multiplied by."""
        ...


def gated(output: Any, keeper: GateKeeper, forward: ForwardPass) -> Any:
    """Return the output, whatever holds its tensors, with a gate before every tensor that requires grad."""
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, output)
    wanted = [tensor for tensor in found if tensor.requires_grad]
    if not wanted:
        return output
    passed = dict(zip(map(id, wanted), _Gate.apply(keeper, forward, *wanted), strict=True))  # type: ignore[no-untyped-call]
    return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), output)


class _Gate(torch.autograd.Function):
    """Identity in forward; in backward it tells the keeper and scales the gradients."""

    @staticmethod
    def forward(ctx: Any, keeper: GateKeeper, forward: ForwardPass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.keeper, ctx.forward_pass = keeper, forward
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        factor = ctx.keeper.backward_begins(ctx.forward_pass)
        return None, None, *(None if gradient is None else gradient * factor for gradient in gradients)


def scaled_loss(loss: torch.Tensor, keeper: GateKeeper, factor: float) -> torch.Tensor:
    """Return the loss times `factor`; its gradient is multiplied by what the keeper says when its backward begins."""
    scaled: torch.Tensor = _Scale.apply(keeper, factor, loss)  # type: ignore[no-untyped-call]
    return scaled


class _Scale(torch.autograd.Function):
    """A loss times a factor."""

    @staticmethod
    def forward(ctx: Any, keeper: GateKeeper, factor: float, loss: torch.Tensor) -> torch.Tensor:
        ctx.keeper = keeper
        return loss * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, gradients[0] * ctx.keeper.loss_begins()
