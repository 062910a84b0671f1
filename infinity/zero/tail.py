"""The tail: from the last unit on, a micro-batch runs forward and straight backward, so that logits of two never live together.

The loss usually reaches earlier units only through the inputs of the last unit. Then its gradient can be taken right away with
respect to those inputs, and the joint backward of all micro-batches starts from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.zero.gradients import GradientSums
from infinity.zero.guards import older_node
from infinity.zero.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class Root:
    """Where the joint backward starts: a tensor and the gradient that is known for it."""

    tensor: torch.Tensor
    gradient: torch.Tensor


def scaled(loss: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the gradient of the step's loss with respect to this micro-batch's: its weight in the mean."""
    return torch.full_like(loss, coefficient, memory_format=torch.preserve_format)


def tail_is_separable(micro_batch: MicroBatch, loss: torch.Tensor) -> bool:
    """Return whether the loss reaches what is older than the last call only through that call's inputs."""
    last = micro_batch.last_call
    if last is None or loss.grad_fn is None:
        return False
    stops = frozenset(tensor.grad_fn for tensor in last.inputs if tensor.grad_fn is not None)
    return older_node([loss], last.sequence_mark, stops) is None


def straight_backward(micro_batch: MicroBatch, loss: torch.Tensor, coefficient: float, sums: GradientSums) -> list[Root]:
    """Backpropagate the loss to the inputs of the last call; book the gradients of the weights on the way.

    Returns the roots from which the joint backward goes on. Frees the graph behind the loss.
    """
    last = micro_batch.last_call
    if last is None:
        return [Root(loss, scaled(loss, coefficient))]
    leaves = list(micro_batch.leaves)
    ends = [*last.inputs, *(leaf.tensor for leaf in leaves)]
    if last.anchor.requires_grad:  # a frozen unit has none of its own to ask for
        ends.append(last.anchor)
    gradients = torch.autograd.grad(loss, ends, scaled(loss, coefficient), allow_unused=True)
    for leaf, gradient in zip(leaves, gradients[len(last.inputs) :], strict=False):
        if gradient is not None:
            sums.add(leaf.shard, leaf.parameter, leaf.position, gradient)
    micro_batch.leaves.clear()
    micro_batch.last_call = None
    return [Root(tensor, gradient) for tensor, gradient in zip(last.inputs, gradients, strict=False) if gradient is not None]
