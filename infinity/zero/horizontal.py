"""Horizontal order: the whole model forward and backward for one micro-batch, then for the next, as users know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.zero.guards import require_some_gradient
from infinity.zero.micro_batch import MicroBatch
from infinity.zero.order import ShardOrder, UnitOrder
from infinity.zero.tail import scaled
from infinity.zero.vertical import ForwardLoss
from infinity.zero.walk import Walk


class Expecting(Protocol):
    """Wants to know in which order shards will be asked for."""

    def expect(self, order: ShardOrder) -> None: ...


def run_horizontally(
    walk: Walk, weights: Expecting, order: UnitOrder, forward_loss: ForwardLoss, micro_batches: Sequence[MicroBatch],
    coefficients: Sequence[float],
) -> list[torch.Tensor]:  # fmt: skip
    """Run forward and backward of each micro-batch in turn; return the detached losses. Gradients are in the walk's sums.

    Raises ModelError where no loss requires a gradient.
    """
    losses, differentiable = [], False
    try:
        if len(micro_batches) > 1:
            walk.sums.outlast_micro_batches()
        for micro_batch in micro_batches:
            walk.begin(micro_batch)
            try:
                loss = forward_loss(micro_batch)
            finally:
                walk.end()
            losses.append(loss.detach())
            if not order.known:
                order.learn(micro_batch.visits)
                weights.expect(order.horizontal_sequence(walk.groups, len(micro_batches)))
            walk.sums.open(is_last=micro_batch is micro_batches[-1])
            if loss.requires_grad:
                differentiable = True
                torch.autograd.backward(loss, scaled(loss, coefficients[micro_batch.index]))
            walk.sums.backward_over()
            del loss
        require_some_gradient(differentiable)
        walk.sums.finish()
    except BaseException:
        walk.sums.discard()
        raise
    return losses
