"""The public engine: forward, backward and step as users know them, and train_batch in vertical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.activations import ActivationMeter
from infinity.engine.calls import LossFunction, call_module, coefficients, find_loss, listed, on_device
from infinity.engine.gate import gated
from infinity.engine.lifetime import ENDS, MOVES, EngineState, FailsOnIo
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.persistence import Persistence
from infinity.engine.results import IoFacts, StepResult
from infinity.engine.update import Updater
from infinity.errors import ConfigError, Diverged, IllegalTransition, StorageError
from infinity.memory.ledger import Ledger, LedgerLine
from infinity.placement.plan import Plan
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder
from infinity.zero.horizontal import run_horizontally
from infinity.zero.micro_batch import MicroBatch
from infinity.zero.order import UnitOrder
from infinity.zero.randomness import Randomness
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.walk import Walk
from infinity.zero.weights import Weights


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that an engine is composed of; `build.py` puts it together."""

    module: nn.Module
    config: Config
    plan: Plan
    device: torch.device
    ledger: Ledger
    recorder: Recorder
    walk: Walk
    weights: Weights
    order: UnitOrder
    vertical: VerticalSchedule
    randomness: Randomness
    updater: Updater
    optimizer: Optimizer
    lr_schedule: LrSchedule
    persistence: Persistence
    activations: ActivationMeter
    num_micro_batches: int
    io: IoFacts
    notes: tuple[str, ...]  # what was not available, in sentences
    resources: ExitStack


class Engine:
    """Trains one module. Made by `infinity.initialize`; closed by `close()` or as a context manager.

    One thread. After a ModelError, Diverged or an exception in the user's own code the step is discarded and the engine goes
    on; after an error of storage or memory, and any other while the update begins, it is FAILED and only `close` is legal.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._lifecycle = Lifecycle("engine", EngineState.READY, MOVES)
        self._num_forwards = 0  # micro-batches begun since the last step
        self._num_backwards = 0  # that began; fewer have ended where one failed
        self._num_backwards_ended = 0
        self._step_number = 0  # changes with every step that is taken or discarded
        self.global_steps = 0  # steps taken, skipped ones included
        self.skipped_steps = 0
        self.last_grad_norm: float | None = None

    # What it is made of

    @property
    def module(self) -> nn.Module:
        """The user's module, whose units run through the engine."""
        return self._parts.module

    @property
    def config(self) -> Config:
        return self._parts.config

    @property
    def plan(self) -> Plan:
        """Where everything lives, and what a step costs."""
        return self._parts.plan

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def ledger(self) -> Ledger:
        return self._parts.ledger

    @property
    def recorder(self) -> Recorder:
        return self._parts.recorder

    @property
    def optimizer(self) -> Optimizer:
        return self._parts.optimizer

    @property
    def lr_scheduler(self) -> LrSchedule:
        return self._parts.lr_schedule

    @property
    def io(self) -> IoFacts:
        """What does the reads and writes, and what is registered with it."""
        return self._parts.io

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not available or was chosen without being asked for, in sentences."""
        return self._parts.notes

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._parts.lr_schedule.lr

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return self.last_grad_norm

    # Vertical

    def train_batch(
        self, micro_batches: Iterable[Any], weights: Sequence[float] | None = None, loss_fn: LossFunction | None = None
    ) -> StepResult:
        """Take one step over the micro-batches: forward, backward and update.

        A micro-batch is a dict (keyword arguments), a tuple (positional) or one tensor. The module returns the loss or an
        output with `.loss`; `loss_fn(output, micro_batch)` computes it otherwise. `weights` (token counts) make the mean
        right where micro-batches differ in size. The order of work is `infinity.schedule` of the configuration.

        Raises IllegalTransition in the middle of another step and for what is no list of micro-batches, ModelError for
        modules that cannot be trained exactly, Diverged after too many skipped steps in a row, ConfigError for a wrong value
        in `optimizer.param_groups`, StorageError, OverBudget.
        """
        self._begin_anew("train_batch")
        batches = listed(micro_batches)
        parts = self._parts
        shares = coefficients(weights, len(batches))
        walking = [MicroBatch(index, index) for index in range(len(batches))]

        def forward_loss(walker: MicroBatch) -> torch.Tensor:
            micro_batch = on_device(batches[walker.index], parts.device)
            return find_loss(call_module(parts.module, micro_batch), micro_batch, loss_fn)

        self._begin_forward()
        with self._failing_on_io(), parts.randomness.borrowed():
            try:
                self._lifecycle.to(EngineState.BACKWARD)
                if parts.config.infinity.schedule == "vertical":
                    losses = parts.vertical.run(forward_loss, walking, shares)
                else:
                    losses = run_horizontally(parts.walk, parts.weights, parts.order, forward_loss, walking, shares)
            except BaseException:
                self._abandon_step()
                raise
        return self._take_step([float(loss) for loss in losses], shares)

    # Horizontal, as users know it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: the next micro-batch of a step in training mode with gradients, an evaluation otherwise.

        `engine.backward(loss)` and `loss.backward()` do the same: gradients are divided by the number of micro-batches.
        """
        parts = self._parts
        self._require_usable()
        args, kwargs = on_device((args, kwargs), parts.device)
        if not (parts.module.training and torch.is_grad_enabled()):
            with self._failing_on_io(), torch.no_grad():  # in eval mode too, where torch alone would keep a graph
                return parts.module(*args, **kwargs)
        self._forget_failed_backward()
        index = self._num_forwards
        micro_batch = MicroBatch(index, index)
        self._begin_forward()
        if index == 0 and parts.num_micro_batches > 1:
            parts.walk.sums.outlast_micro_batches()
        self._num_forwards += 1
        with self._failing_on_io(), parts.randomness.borrowed():
            parts.walk.begin(micro_batch)
            try:
                output = parts.module(*args, **kwargs)
            except BaseException:
                self._abandon_step()
                raise
            finally:
                parts.walk.end()
        if not parts.order.known:
            parts.order.learn(micro_batch.visits)
            parts.weights.expect(parts.order.horizontal_sequence(parts.walk.groups, parts.num_micro_batches))
        return gated(output, self, self._step_number)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backpropagate the loss of one micro-batch, divided by the number of micro-batches of a step.

        An exception discards the step: part of the gradient was summed already.
        """
        with self._failing_on_io():
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            except BaseException:
                self._abandon_step()
                raise
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` takes an optimizer step: every micro-batch has run backward."""
        return self._num_backwards >= self._parts.num_micro_batches

    def step(self) -> None:
        """Take the optimizer step at the boundary of a step's micro-batches; before it, do nothing."""
        self._require_usable()
        self._forget_failed_backward()
        if self.is_gradient_accumulation_boundary():
            with self._failing_on_io():
                self._parts.walk.sums.finish()
                self._take_step([], [])

    def zero_grad(self) -> None:
        """Discard the step that was begun: its forward passes, and what their backward passes have summed.

        There is nothing to discard after `step` has taken it. Raises IllegalTransition while the module runs.
        """
        self._require_usable()
        self._require_idle("zero_grad")
        self._abandon_step()

    # State

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self._parts.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode; engine(...) then runs without gradients."""
        return self.train(False)

    def synchronize(self) -> None:
        """Make every pending update and wait until all of it is in its tier."""
        self._require_usable()
        with self._failing_on_io():
            self._drain()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fp32 master value on the CPU) of every parameter, one at a time."""
        self.synchronize()
        yield from self._parts.persistence.full_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all fp32 master values and the module's buffers, for models that fit in memory; tied names included."""
        self.synchronize()
        return self._parts.persistence.state_dict()

    def save_checkpoint(
        self, directory: str | Path, *, extra: Mapping[str, object] | None = None, keep: int | None = None
    ) -> Path:
        """Write `<directory>/step-<n>` and return its path; `extra` is JSON-able and comes back from `load_checkpoint`.

        With `keep`, only the newest that many complete checkpoints remain, unless this one had to be committed in place.
        Raises CheckpointError, SwapSpaceError.
        """
        self.synchronize()
        return self._parts.persistence.save(
            Path(directory),
            global_step=self.global_steps,
            skipped_steps=self.skipped_steps,
            extra=dict(extra or {}),
            keep=keep,
        )

    def load_checkpoint(self, path: str | Path) -> dict[str, object]:
        """Load a checkpoint (its own directory, or one that holds several: the newest complete one); return its `extra`.

        Raises CheckpointError and its kinds; then the engine's state is as before, except after an error of reading.
        Raises IllegalTransition in the middle of a step of the familiar loop.
        """
        self._begin_anew("load_checkpoint")
        self.synchronize()
        with self._failing_on_io():
            restored = self._parts.persistence.load(Path(path))
        self.global_steps, self.skipped_steps = restored.global_step, restored.skipped_steps
        self._parts.randomness.step = self.global_steps
        return restored.extra

    def memory_report(self) -> tuple[LedgerLine, ...]:
        """Return used and peak bytes for each tier and owner."""
        return self._parts.ledger.report()

    def close(self) -> None:
        """Wait for what is in flight, remove the swap files, and give all memory back. Closing twice is fine.

        Raises StorageError for what was in flight, unless the engine has FAILED with one before.
        The module gets its own forward back; its weights are gone unless they were saved.
        """
        if self._lifecycle.state is EngineState.CLOSED:
            return
        has_failed = self._lifecycle.state is EngineState.FAILED
        self._lifecycle.to(EngineState.CLOSED)
        try:
            self._parts.resources.close()
        except StorageError:
            if not has_failed:
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside a step

    def _begin_forward(self) -> None:
        self._require_usable()
        self._lifecycle.to(EngineState.FORWARD)
        self._parts.randomness.step = self.global_steps

    def backward_begins(self, step_number: int) -> float:
        """Called by the gate when a backward reaches it; returns what its gradients are multiplied by."""
        if step_number != self._step_number:
            raise IllegalTransition(
                "A loss was backpropagated whose step is over: it was taken, or discarded after an error or by zero_grad.",
                remedy="Call backward before engine.step(), for the losses of the forward passes since the last one.",
            )
        self._lifecycle.to(EngineState.BACKWARD)
        self._num_backwards += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if self.is_gradient_accumulation_boundary():
            self._parts.walk.sums.open()
        return 1.0 / self._parts.num_micro_batches

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that did not fail."""
        self._num_backwards_ended += 1

    def _forget_failed_backward(self) -> None:
        """Discard the step if a plain `loss.backward()` failed: part of its gradient was summed already."""
        if self._num_backwards != self._num_backwards_ended:
            self._abandon_step()

    def _take_step(self, losses: list[float], shares: Sequence[float]) -> StepResult:
        parts = self._parts
        self._lifecycle.to(EngineState.STEPPING)
        counters = parts.recorder.take_counters()  # before the update begins: what it moves is the next step's
        try:
            with self._failing_on_io():
                update = parts.updater.step()
        except (ConfigError, Diverged):  # before anything was touched
            self._abandon_step()
            raise
        except BaseException:
            if self._lifecycle.state not in ENDS:  # an interrupt, too: part of the update is made, or will be
                self._lifecycle.to(EngineState.FAILED)
            raise
        parts.activations.book()
        self.global_steps += 1
        self.skipped_steps += update.skipped
        self.last_grad_norm = update.grad_norm
        self._forget_passes()
        self._lifecycle.to(EngineState.READY)
        return StepResult(
            step=self.global_steps,
            loss=sum(loss * share for loss, share in zip(losses, shares, strict=True)),
            losses=tuple(losses),
            grad_norm=update.grad_norm,
            clip_coefficient=update.clip_coefficient,
            lr=update.lr,
            skipped=update.skipped,
            first_not_finite=update.first_not_finite,
            unit_loads=counters.get("unit_loads", 0),
            nvme_read_bytes=counters.get("nvme_read_bytes", 0),
            nvme_write_bytes=counters.get("nvme_write_bytes", 0),
            gradient_spill_bytes=counters.get("gradient_spill_bytes", 0),
        )

    def _abandon_step(self) -> None:
        """A forward or backward failed: forget the step; the states are those of the step before."""
        with self._failing_on_io():
            self._parts.walk.sums.discard()
            self._parts.updater.discard()
        self._forget_passes()
        if self._lifecycle.state not in (EngineState.READY, *ENDS):
            self._lifecycle.to(EngineState.READY)

    def _forget_passes(self) -> None:
        self._num_forwards = self._num_backwards = self._num_backwards_ended = 0
        self._step_number += 1

    def _drain(self) -> None:
        self._parts.updater.drain()
        self._parts.weights.settle()

    def _require_usable(self) -> None:
        if self._lifecycle.state in ENDS:
            raise IllegalTransition(
                f"The engine is {self._lifecycle.state.name}.", remedy="Make a new one and load its last checkpoint."
            )

    def _begin_anew(self, call: str) -> None:
        """Require that no gradient waits for a step; forward passes that no backward followed are forgotten."""
        self._require_usable()
        self._require_idle(call)
        self._forget_failed_backward()
        if self._num_backwards:
            raise IllegalTransition(
                f"{call} was called {self._num_backwards} of {self._parts.num_micro_batches} backward passes into a step.",
                remedy="Finish that step with engine.step() after the last of them, or discard it with engine.zero_grad().",
            )
        if self._num_forwards:
            self._abandon_step()

    def _require_idle(self, call: str) -> None:
        is_in_train_batch = self._lifecycle.state is not EngineState.READY and not self._num_forwards
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_train_batch or is_in_backward or self._parts.walk.micro_batch is not None:
            raise IllegalTransition(
                f"{call} was called while the engine's own module runs.", remedy="Call it when the step before is done."
            )

    def _failing_on_io(self) -> FailsOnIo:
        return FailsOnIo(self._lifecycle)
