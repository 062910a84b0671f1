"""Vertical order: unit u serves every micro-batch of a step before unit u+1 is touched.

Each micro-batch's forward runs in a greenlet that stops at every unit. Those that wait at the earliest unit go on, in
descending order, so that autograd, which executes nodes in descending order of creation, brings their backward passes in
ascending order. At the last unit the tail begins (see tail.py), then one joint backward serves every unit once more.

    forward   unit 0: A-1 .. 0    unit 1: A-1 .. 0    ...    tail: 0, its backward, 1, its backward, ...
    backward  unit L-2: 0 .. A-1  ...                         unit 0: 0 .. A-1

The order of units is learnt by running the first micro-batch of the first step alone, once more than it would run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field

import torch
from greenlet import getcurrent, greenlet

from infinity.telemetry.recorder import Recorder
from infinity.zero.ambient import Ambient, Modes, ambient, modes
from infinity.zero.attributes import snapshot
from infinity.zero.buffers import buffer_values, changed, restore
from infinity.zero.guards import require_own_graph, require_some_gradient
from infinity.zero.micro_batch import MicroBatch, Visit
from infinity.zero.order import UnitOrder
from infinity.zero.tail import Root, scaled, separable_tail, straight_backward
from infinity.zero.walk import Walk
from infinity.zero.weights import Weights

# Runs one micro-batch through the model and returns its loss, a scalar tensor.
ForwardLoss = Callable[[MicroBatch], torch.Tensor]


@dataclass(slots=True)
class _Runner:
    """One micro-batch in its greenlet: not begun, waiting at a unit, or over."""

    micro_batch: MicroBatch
    thread: greenlet
    attributes: tuple[object, ...]  # its own ones, while others run
    waiting_at: Visit | None = None


@dataclass(slots=True)
class _Step:
    """One step in progress."""

    runners: dict[int, _Runner]
    coefficients: Sequence[float]
    attributes: tuple[object, ...]  # what modules hold at the end: what the last micro-batch left, or what was before
    losses: dict[int, torch.Tensor] = field(default_factory=dict)  # detached
    roots: list[Root] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # shards whose weights the tail uses
    graph_waits: bool = False  # whether a tail's graph lives until the joint backward
    differentiable: bool = False  # whether any loss requires a gradient


class VerticalSchedule:
    """Runs steps in vertical order. Owner: the engine.

    After an exception all greenlets are closed, the caller's state is restored and no gradient is left.
    """

    def __init__(self, walk: Walk, weights: Weights, order: UnitOrder, recorder: Recorder, device: torch.device) -> None:
        self._walk = walk
        self._weights = weights
        self._order = order
        self._recorder = recorder
        self._device = device
        self._device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._scheduler: greenlet | None = None
        self._base: Ambient | None = None
        self._base_modes: Modes | None = None
        self._running: _Runner | None = None

    def run(
        self, forward_loss: ForwardLoss, micro_batches: Sequence[MicroBatch], coefficients: Sequence[float]
    ) -> list[torch.Tensor]:
        """Run forward and backward of every micro-batch; return the detached losses. Gradients are in the walk's sums.

        Raises ModelError where no loss requires a gradient, and its kinds for units that cannot be run exactly.
        """
        if not self._order.knows_tail:
            self._learn(forward_loss, micro_batches[0])
        self._scheduler = getcurrent()
        self._base, self._base_modes = ambient(self._device_types), modes(self._device)
        attributes = self._walk.own_attributes.values()
        runners = {m.index: self._runner(forward_loss, m, attributes) for m in reversed(micro_batches)}
        step = _Step(runners, coefficients, attributes)
        try:
            with self._walk.ordered_by(self):
                self._forward(step)
            require_some_gradient(step.differentiable)
            self._walk.end()
            self._walk.sums.open()
            self._joint_backward(step)
            self._walk.sums.finish()
        finally:
            self._close(step)
        return [step.losses[m.index] for m in micro_batches]

    # Forward

    def arrive(self, unit: int) -> None:
        """Called in a micro-batch's greenlet at the entry to a unit: let those go first who are behind."""
        runner = self._running
        if runner is None or self._scheduler is None or self._base is None or getcurrent() is not runner.thread:
            return
        if modes(self._device) != self._base_modes:
            self._recorder.count("arrivals_without_yield", 1)
            return
        own = ambient(self._device_types)
        runner.waiting_at = runner.micro_batch.next_visit(unit)
        self._base.restore()
        self._scheduler.switch()
        own.restore()
        runner.waiting_at = None

    def _runner(self, forward_loss: ForwardLoss, micro_batch: MicroBatch, attributes: tuple[object, ...]) -> _Runner:
        def body() -> torch.Tensor:
            self._walk.begin(micro_batch)
            try:
                return forward_loss(micro_batch)
            finally:
                micro_batch.walking = False

        thread = greenlet(body)
        thread.gr_context = copy_context()
        return _Runner(micro_batch, thread, attributes)

    def _forward(self, step: _Step) -> None:
        runners = list(step.runners.values())  # descending
        for runner in runners:
            self._resume(step, runner)
        while waiting := [runner for runner in runners if not runner.thread.dead]:
            earliest = min(self._rank(runner) for runner in waiting)
            group = [runner for runner in waiting if self._rank(runner) == earliest]
            if len(group) == len(waiting) and self._at_tail(group[0]):
                self._tails(step, group)
                return
            for runner in group:
                self._resume(step, runner)

    def _resume(self, step: _Step, runner: _Runner) -> None:
        """Let a micro-batch run to its next unit, or to its end."""
        self._running = runner
        self._walk.own_attributes.put(runner.attributes)
        if runner.thread:  # it has begun: the walk goes on with it
            self._walk.micro_batch = runner.micro_batch
        result = runner.thread.switch()
        self._running = None
        runner.attributes = self._walk.own_attributes.values()
        if runner.thread.dead:
            if runner.micro_batch.index == max(step.runners):
                step.attributes = runner.attributes
            runner.attributes = ()
            self._over(step, runner.micro_batch, result)

    def _over(self, step: _Step, micro_batch: MicroBatch, loss: torch.Tensor) -> None:
        """The micro-batch ended: it goes straight back if it is in the tail, and in the joint backward otherwise."""
        if self._base is not None:
            self._base.restore()
        step.losses[micro_batch.index] = loss.detach()
        step.differentiable |= loss.requires_grad
        coefficient = step.coefficients[micro_batch.index]
        last = separable_tail(micro_batch, loss) if micro_batch.straight else None
        require_own_graph([loss] if last is None else last.inputs, micro_batch)
        if last is not None:
            step.roots.extend(straight_backward(micro_batch, last, loss, coefficient, self._walk.sums))
            return
        step.roots.append(Root(loss, scaled(loss, coefficient)))
        if micro_batch.straight:  # the loss reaches further back: its graph, and the weights in it, wait
            self._recorder.count("tails_not_separable", 1)
            self._walk.sums.expect(sorted({leaf.shard for leaf in micro_batch.leaves}))
            step.graph_waits = True

    def _rank(self, runner: _Runner) -> float:
        return self._order.rank(runner.micro_batch.visits, runner.waiting_at)

    def _at_tail(self, runner: _Runner) -> bool:
        return self._order.tail is not None and runner.waiting_at == self._order.tail

    def _learn(self, forward_loss: ForwardLoss, first: MicroBatch) -> None:
        """Run a micro-batch alone, remember its way, and forget all else: gradients, buffers, attributes, its graph.

        Were it kept, its backward would come after all the others', and every unit's sums would wait for it.
        """
        micro_batch = MicroBatch(first.index, first.global_index, learning=True)
        before, attributes = buffer_values(self._walk.module), snapshot(self._walk.module)
        try:
            self._walk.begin(micro_batch)
            last = separable_tail(micro_batch, forward_loss(micro_batch))
        finally:
            self._walk.end()
            self._walk.sums.discard()
            restore(changed(before))
            self._walk.own_attributes.learn(attributes, snapshot(self._walk.module))
        self._recorder.count("tails_not_separable", int(last is None))
        self._order.learn_with_tail(micro_batch.visits, last.visit if last is not None else None)
        self._weights.expect(self._order.vertical_sequence(self._walk.groups))

    # Tail and backward

    def _tails(self, step: _Step, group: Sequence[_Runner]) -> None:
        """Run each micro-batch from the last unit to its loss and straight back, in ascending order."""
        for shard in self._walk.groups(self._order.tail.unit) if self._order.tail is not None else ():
            self._weights.acquire(shard)
            step.held.append(shard)
        for runner in reversed(group):
            runner.micro_batch.straight = True
            runner.micro_batch.leaves.clear()
            while not runner.thread.dead:
                self._resume(step, runner)
        if not step.graph_waits:
            self._release(step)

    def _joint_backward(self, step: _Step) -> None:
        roots = [root for root in step.roots if root.tensor.requires_grad]
        step.roots = []
        if roots:
            torch.autograd.backward([root.tensor for root in roots], [root.gradient for root in roots])
        self._release(step)

    def _release(self, step: _Step) -> None:
        while step.held:
            self._weights.release(step.held.pop())

    def _close(self, step: _Step) -> None:
        """Whatever happened: no greenlet and no weights are held, and parameters and attributes are in their places."""
        with ExitStack() as closing:  # each part is done even if the one before raises
            closing.callback(self._forget, step)
            closing.callback(self._release, step)
            for runner in step.runners.values():
                closing.callback(runner.micro_batch.forget)
                if not runner.thread.dead:
                    closing.callback(runner.thread.throw)

    def _forget(self, step: _Step) -> None:
        if self._base is not None:
            self._base.restore()
        self._walk.own_attributes.put(step.attributes)
        self._walk.sums.discard()  # nothing is left of a step that failed; after `finish` there is nothing anyway
        self._walk.end()
        self._running = None
        self._scheduler = None
