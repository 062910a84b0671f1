"""The loop that users know, one call at a time: forward, backward, step. Micro-batches run in horizontal order."""

from __future__ import annotations

from typing import Any

import torch

from infinity.engine.calls import on_device
from infinity.engine.gate import gated, scaled_loss
from infinity.engine.lifetime import EngineState
from infinity.engine.open_step import OpenStep
from infinity.engine.parts import EngineParts
from infinity.engine.passes import ForwardPass
from infinity.zero.micro_batch import MicroBatch
from infinity.zero.unit_call import graph_is_kept


class FamiliarLoop:
    """Runs the passes of one micro-batch when they are called. The gate keeper of its outputs."""

    def __init__(self, parts: EngineParts, open_step: OpenStep) -> None:
        self._parts, self._step = parts, open_step
        self._passes = open_step.passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the next micro-batch, or evaluate it."""
        parts = self._parts
        self._step.require_usable()
        args, kwargs = on_device((args, kwargs), parts.device)
        if not (parts.module.training and torch.is_grad_enabled()):
            with self._step.failing_on_io(), torch.no_grad():  # in eval mode too, where torch alone would keep a graph
                return parts.module(*args, **kwargs)
        self._step.forget_failed_backward()
        self._step.begin_forward()
        forward = self._passes.begin_forward()
        micro_batch = MicroBatch(forward.index, parts.group.rank * self._passes.num_micro_batches + forward.index)
        if forward.index == 0 and self._passes.sums_outlast:
            parts.walk.sums.outlast_micro_batches()
        with self._step.failing_on_io(), parts.randomness.borrowed():
            parts.walk.begin(micro_batch)
            try:
                output = parts.module(*args, **kwargs)
            except BaseException as error:
                self._step.give_up(error)
                raise
            finally:
                parts.walk.end()
        if not parts.order.known:
            parts.order.learn(micro_batch.visits)
            parts.weights.expect(parts.order.horizontal_sequence(parts.walk.groups, parts.batch.num_micro_batches))
        return gated(output, self, forward)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, scale_wrt_gas: bool) -> torch.Tensor:
        """Backpropagate the loss of one micro-batch; return its part of the mean. An exception discards the step."""
        num_ranks = self._parts.group.size
        share = self._share if scale_wrt_gas else 1.0 / num_ranks
        with self._step.failing_on_io():
            try:
                self._parts.loss_scaler.backpropagate(loss, share, retain_graph=retain_graph)
            except BaseException as error:
                self._step.give_up(error)
                raise
        return loss.detach() * (share * num_ranks)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as `backward` would begin it, for the user's own `.backward()`."""
        return scaled_loss(loss, self, self._parts.loss_scaler.factor(self._share))

    def step(self) -> None:
        """Take the step at its boundary; before it, do nothing."""
        self._step.require_usable()
        self._passes.require_step()
        self._step.forget_failed_backward()
        self._step.was_applied = False
        if self._passes.at_boundary:
            with self._step.failing_on_io():
                self._parts.walk.sums.finish()
                self._step.take([], [])

    def zero_grad(self) -> None:
        """Discard the step that was begun, if any."""
        self._step.require_usable()
        self._step.require_idle("zero_grad")
        self._step.abandon()

    def finish_gradients(self) -> None:
        """Make the gradients of the step final before `step` does."""
        self._step.require_usable()
        self._step.require_idle("Reading gradients")
        self._step.forget_failed_backward()
        self._passes.finish()
        with self._step.failing_on_io():
            self._parts.walk.sums.finish()
            self._parts.updater.share_touched()

    def require_no_graph(self, call: str) -> None:
        """Raise IllegalTransition while a backward is to come whose forward has used the weights."""
        self._step.require_usable()
        self._step.require_idle(call)
        self._passes.require_no_graph(call)

    # Called by autograd

    def backward_begins(self, forward: ForwardPass) -> float:
        """A backward has reached the gate; return what its gradients are multiplied by."""
        num_before, keeps_graph = self._passes.num_backwards, graph_is_kept()
        self._passes.begin_backward(forward)
        self._step.lifecycle.to(EngineState.BACKWARD)
        is_first = self._passes.num_backwards > num_before

        def ended() -> None:  # unless the backward has failed
            with self._step.failing_on_io():
                self._parts.walk.sums.backward_over()
            self._passes.end_backward(forward, keeps_graph=keeps_graph)
            self._step.micro_steps += is_first

        torch.autograd.Variable._execution_engine.queue_callback(ended)
        self._parts.walk.sums.open(is_last=self._passes.at_boundary and not keeps_graph)
        return self._parts.loss_scaler.factor_left(self._share)

    def loss_begins(self) -> float:
        """A backward begins with a loss that `scale` has made."""
        return self._parts.loss_scaler.factor_of_loss(self._share)

    @property
    def _share(self) -> float:
        """The weight of one micro-batch in the step's mean loss over all ranks."""
        return 1.0 / (self._parts.batch.num_micro_batches * self._parts.group.size)
