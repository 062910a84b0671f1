"""The tail: from the last unit on, a micro-batch runs forward and straight backward, so that two never have logits alive.

The loss usually reaches earlier units only through the inputs of the last unit. Then its gradient can be taken right away
with respect to those inputs, and the joint backward of all micro-batches starts from them. The inputs are aliases made for
that one call: so none of them reaches another, and a user's hook on the tensor behind one runs once, in the joint backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.zero.gradients import GradientSums
from infinity.zero.guards import graph_nodes, variable_of
from infinity.zero.micro_batch import LastCall, MicroBatch

_NEEDS_WHOLE_BACKWARD = "CheckpointFunctionBackward"  # torch.utils.checkpoint(use_reentrant=True)


@dataclass(frozen=True, slots=True)
class Root:
    """Where the joint backward starts: a tensor and the gradient that is known for it."""

    tensor: torch.Tensor
    gradient: torch.Tensor


def scaled(loss: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the gradient of the step's loss with respect to this micro-batch's: its weight in the mean, times a loss scale.

    It is infinite where the loss's dtype cannot hold it, as an fp16 loss and a large scale have it.
    """
    wide = torch.full_like(loss, coefficient, dtype=torch.float64, memory_format=torch.preserve_format)
    return wide.to(loss.dtype)


def separable_tail(micro_batch: MicroBatch, loss: torch.Tensor) -> LastCall | None:
    """Return the last call if the loss reaches nothing from before it but through its inputs; None otherwise.

    None, too, where torch refuses a backward to anything but the leaves. Whatever else the loss may reach ends in a leaf
    from before: a parameter, or the anchor of an earlier unit.
    """
    last = micro_batch.last_call
    if last is None:
        return None
    stops = frozenset(tensor.grad_fn for tensor in last.inputs)
    known = {id(leaf.tensor) for leaf in micro_batch.leaves} | {id(last.anchor)}
    for node in graph_nodes([loss], stops):
        variable = variable_of(node)
        if node.name() == _NEEDS_WHOLE_BACKWARD or (variable is not None and id(variable) not in known):
            return None
    return last


def straight_backward(
    micro_batch: MicroBatch, last: LastCall, loss: torch.Tensor, coefficient: float, sums: GradientSums
) -> list[Root]:
    """Backpropagate the loss to the inputs of the last call; book the gradients of the weights on the way.

    Returns the roots from which the joint backward goes on. Frees the graph behind the loss.
    """
    leaves = [leaf for leaf in micro_batch.leaves if leaf.tensor.requires_grad]
    ends = [*last.inputs, *(leaf.tensor for leaf in leaves)]
    if not ends or not loss.requires_grad:
        return []
    gradients = torch.autograd.grad(loss, ends, scaled(loss, coefficient), allow_unused=True)
    for leaf, gradient in zip(leaves, gradients[len(last.inputs) :], strict=True):
        if gradient is not None:
            sums.add(leaf.shard, leaf.parameter, leaf.visit, gradient)
    return [Root(tensor, gradient) for tensor, gradient in zip(last.inputs, gradients, strict=False) if gradient is not None]
