"""The public engine: forward, backward and step as users know them, and train_batch in vertical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.calls import LossFunction, call_module, coefficients, find_loss, listed, on_device
from infinity.engine.gate import gated
from infinity.engine.lifetime import ENDS, MOVES, EngineState, FailsOnIo
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.parts import EngineParts
from infinity.engine.passes import Passes
from infinity.engine.persistence import StepCounts
from infinity.engine.results import IoFacts, StepResult, step_result
from infinity.engine.tags import LoadedCheckpoint
from infinity.errors import ConfigError, Diverged, IllegalTransition, StorageError
from infinity.memory.ledger import Ledger, LedgerLine
from infinity.placement.plan import Plan
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder
from infinity.zero.horizontal import run_horizontally
from infinity.zero.micro_batch import MicroBatch


class Engine:
    """Trains one module. Made by `infinity.initialize`; closed by `close()` or as a context manager.

    One thread. After a ModelError, Diverged or an exception in the user's own code the step is discarded and the engine goes
    on; after an error of storage or memory, and any other while the update begins, it is FAILED and only `close` is legal.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._lifecycle = Lifecycle("engine", EngineState.READY, MOVES)
        self._passes = Passes(parts.batch.num_micro_batches)
        self._step_was_applied = False
        self.micro_steps = 0  # micro-batches that have run backward
        self.global_steps = self.skipped_steps = 0  # global: steps taken, skipped ones included
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
        """What was not available or was chosen unasked, in sentences."""
        return self._parts.notes

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._parts.lr_schedule.lr

    @property
    def loss_scale(self) -> float:
        return self._parts.loss_scaler.scale

    @property
    def global_rank(self) -> int:
        return self._parts.ranks.global_rank

    @property
    def local_rank(self) -> int:
        return self._parts.ranks.local_rank

    @property
    def world_size(self) -> int:
        return self._parts.ranks.world_size

    def train_batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        return self._parts.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._parts.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._parts.batch.num_micro_batches

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step, by parameter group."""
        return self._parts.lr_schedule.get_last_lr()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return self.last_grad_norm

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` or `train_batch` changed weights: it was at a boundary and not skipped."""
        return self._step_was_applied

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
        batches, parts = listed(micro_batches), self._parts
        shares = coefficients(weights, len(batches))
        gradients = [share * self.loss_scale for share in shares]  # of the step's scaled loss with respect to each
        walking = [MicroBatch(index, index) for index in range(len(batches))]

        def forward_loss(walker: MicroBatch) -> torch.Tensor:
            micro_batch = on_device(batches[walker.index], parts.device)
            return find_loss(call_module(parts.module, micro_batch), micro_batch, loss_fn)

        self._begin_forward()
        with self._failing_on_io(), parts.randomness.borrowed():
            try:
                self._lifecycle.to(EngineState.BACKWARD)
                if parts.config.infinity.schedule == "vertical":
                    losses = parts.vertical.run(forward_loss, walking, gradients)
                else:
                    losses = run_horizontally(parts.walk, parts.weights, parts.order, forward_loss, walking, gradients)
            except BaseException:
                self._abandon_step()
                raise
        self.micro_steps += len(batches)
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
        index = self._passes.num_forwards
        micro_batch = MicroBatch(index, index)
        self._begin_forward()
        if index == 0 and self._passes.sums_outlast:
            parts.walk.sums.outlast_micro_batches()
        self._passes.num_forwards += 1
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
            parts.weights.expect(parts.order.horizontal_sequence(parts.walk.groups, parts.batch.num_micro_batches))
        return gated(output, self, self._passes.step_number)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Backpropagate the loss of one micro-batch, divided by the number of micro-batches and times the loss scale.

        An exception discards the step: part of the gradient was summed already.
        """
        with self._failing_on_io():
            try:
                self._parts.loss_scaler.backpropagate(loss, self._parts.batch.num_micro_batches)
            except BaseException:
                self._abandon_step()
                raise
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` takes an optimizer step: every micro-batch has run backward."""
        return self._passes.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether `step` takes an optimizer step, instead of counting backward passes; None counts again.

        What gradients are divided by stays the configured number of micro-batches.
        """
        self._passes.say(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only sum gradients inside the block: the step's last micro-batch, and `step`, come after it."""
        return self._passes.hold_back()

    def step(self) -> None:
        """Take the optimizer step at the boundary of a step's micro-batches; before it, do nothing."""
        self._require_usable()
        self._passes.require_step()
        self._forget_failed_backward()
        self._step_was_applied = False
        if self.is_gradient_accumulation_boundary():
            with self._failing_on_io():
                self._parts.walk.sums.finish()
                self._take_step([], [])

    def zero_grad(self) -> None:
        """Discard the step that was begun, if any: its forward passes, and what their backward passes have summed.

        Raises IllegalTransition while the module runs.
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
            self._parts.updater.drain()
            self._parts.weights.settle()

    def finish_gradients(self) -> None:
        """Make the gradients of a step final before `step` does, so that they may be read and set.

        Raises IllegalTransition before the last backward of the step.
        """
        self._require_usable()
        self._require_idle("Reading gradients")
        self._forget_failed_backward()
        self._passes.finish()
        with self._failing_on_io():
            self._parts.walk.sums.finish()

    def require_no_graph(self, call: str) -> None:
        """Raise IllegalTransition while a backward is to come whose forward has used the weights."""
        self._require_usable()
        self._require_idle(call)
        self._passes.require_no_graph(call)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fp32 master value on the CPU) of every parameter, one at a time."""
        self.synchronize()
        yield from self._parts.persistence.full_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all fp32 master values and the module's buffers, for models that fit in memory; tied names included."""
        self.synchronize()
        return self._parts.persistence.state_dict()

    def save_checkpoint(
        self, directory: str | Path, tag: str | None = None, client_state: Mapping[str, object] | None = None,
        *, keep: int | None = None,
    ) -> Path:  # fmt: skip
        """Write `<directory>/step-<n>`, with a tag `<directory>/<tag>/step-<n>`, and return its path.

        `client_state` is JSON-able and comes back from `load_checkpoint`. With `keep`, only the newest that many complete
        ones remain there, unless this one had to be committed in place. Raises CheckpointError, SwapSpaceError.
        """
        self.synchronize()
        steps = StepCounts(self.global_steps, self.skipped_steps)
        return self._parts.persistence.save(Path(directory), tag, steps, extra=dict(client_state or {}), keep=keep)

    def load_checkpoint(self, path: str | Path, tag: str | None = None) -> LoadedCheckpoint:
        """Load a checkpoint and return (its path, its client_state).

        `path` is its own directory, or one that `save_checkpoint` was given: then of this tag, else of the tag saved last,
        the newest complete one. Raises CheckpointError and its kinds; then the engine's state is as before, except after an
        error of reading. Raises IllegalTransition in the middle of a step of the familiar loop.
        """
        self._begin_anew("load_checkpoint")
        self.synchronize()
        with self._failing_on_io():
            restored = self._parts.persistence.load(Path(path), tag)
        self.global_steps, self.skipped_steps = restored.steps.taken, restored.steps.skipped
        self._parts.randomness.step = self.global_steps
        return LoadedCheckpoint(restored.path, restored.extra)

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
        self._passes.require_backward(step_number)
        self._lifecycle.to(EngineState.BACKWARD)
        self._passes.num_backwards += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if self.is_gradient_accumulation_boundary():
            self._parts.walk.sums.open()
        return self._parts.loss_scaler.factor_left(self._parts.batch.num_micro_batches)

    def _backward_ended(self) -> None:
        """Called by autograd at the end of a backward that did not fail."""
        self._passes.num_backwards_ended += 1
        self.micro_steps += 1

    def _forget_failed_backward(self) -> None:
        """Discard the step if a plain `loss.backward()` failed: part of its gradient was summed already."""
        if self._passes.has_failed:
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
        self._step_was_applied = not update.skipped
        self._passes.forget()
        self._lifecycle.to(EngineState.READY)
        return step_result(self.global_steps, losses, shares, update, counters)

    def _abandon_step(self) -> None:
        """A forward or backward failed: forget the step; the states are those of the step before."""
        with self._failing_on_io():
            self._parts.walk.sums.discard()
            self._parts.updater.discard()
        self._passes.forget()
        if self._lifecycle.state not in (EngineState.READY, *ENDS):
            self._lifecycle.to(EngineState.READY)

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
        self._passes.require_none_waiting(call)
        if self._passes.num_forwards:
            self._abandon_step()

    def _require_idle(self, call: str) -> None:
        is_in_train_batch = self._lifecycle.state is not EngineState.READY and not self._passes.num_forwards
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_train_batch or is_in_backward or self._parts.walk.micro_batch is not None:
            raise IllegalTransition(
                f"{call} was called while the engine's own module runs.", remedy="Call it when the step before is done."
            )

    def _failing_on_io(self) -> FailsOnIo:
        return FailsOnIo(self._lifecycle)
