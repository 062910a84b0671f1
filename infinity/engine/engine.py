"""The public engine: forward, backward and step as users know them, and train_batch in vertical order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.comm.group import Group
from infinity.config import Config
from infinity.engine.calls import LossFunction, call_module, coefficients, find_loss, listed, on_device
from infinity.engine.familiar_loop import FamiliarLoop
from infinity.engine.lifetime import EngineState
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.open_step import OpenStep
from infinity.engine.optimizer import Optimizer
from infinity.engine.parts import EngineParts
from infinity.engine.persistence import StepCounts
from infinity.engine.ranks import reason_words
from infinity.engine.results import IoFacts, StepResult
from infinity.engine.tags import LoadedCheckpoint
from infinity.errors import IllegalTransition, StorageError
from infinity.memory.ledger import Ledger, LedgerLine
from infinity.not_offered import missing
from infinity.placement.plan import Plan
from infinity.telemetry.recorder import Recorder
from infinity.zero.horizontal import run_horizontally
from infinity.zero.micro_batch import MicroBatch


class Engine:
    """Trains one module. Made by `infinity.initialize`; closed by `close()` or as a context manager.

    One thread. After a ModelError, Diverged or an exception in the user's own code the step is discarded and the engine goes
    on; after an error of storage or memory, and any other while the update begins, it is FAILED and only `close` is legal.
    Over several ranks the others are in the same step: what discards it on one rank makes the engine FAILED there, and a
    CommError that quotes it is raised on the others. After what all of them raise alike, such as Diverged, they go on.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._step = OpenStep(parts)
        self._loop = FamiliarLoop(parts, self._step)

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
        return self._step.lifecycle.state

    @property
    def micro_steps(self) -> int:
        """Micro-batches that have run backward."""
        return self._step.micro_steps

    @property
    def global_steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self._step.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all steps taken, over all ranks."""
        return self.global_steps * self.train_batch_size()

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing: a gradient was not finite."""
        return self._step.skipped_steps

    @property
    def last_grad_norm(self) -> float | None:
        return self._step.last_grad_norm

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._parts.lr_schedule.lr

    @property
    def loss_scale(self) -> float:
        return self._parts.loss_scaler.scale

    @property
    def group(self) -> Group:
        """The ranks of the job, as this one sees them; every rank makes the same calls of it in the same order."""
        return self._parts.group

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

    def get_mom(self) -> list[Any]:
        """Return the betas of the next step, by parameter group: the momentum for SGD and RMSprop, None for Adagrad."""
        return [group.get("betas", group.get("momentum")) for group in self._parts.optimizer.param_groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a micro-batch of one rank, and the micro-batches of a rank's step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping; None before the first step."""
        return self._step.last_grad_norm

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` or `train_batch` changed weights: it was at a boundary and not skipped."""
        return self._step.was_applied

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
        self._step.begin_anew("train_batch")
        batches, parts = listed(micro_batches), self._parts
        num_micro_batches, group = len(batches), parts.group
        with self._step.failing_on_io():
            shares = coefficients(weights, num_micro_batches, group.size, parts.agreement.total)
        gradients = [share * self.loss_scale for share in shares]  # of the step's scaled loss with respect to each
        first = group.rank * max(num_micro_batches, parts.batch.num_micro_batches)
        walking = [MicroBatch(index, first + index) for index in range(num_micro_batches)]

        def forward_loss(walker: MicroBatch) -> torch.Tensor:
            micro_batch = on_device(batches[walker.index], parts.device)
            return find_loss(call_module(parts.module, micro_batch), micro_batch, loss_fn)

        self._step.begin_forward()
        with self._step.failing_on_io(), parts.randomness.borrowed():
            try:
                self._step.lifecycle.to(EngineState.BACKWARD)
                if parts.config.infinity.schedule == "vertical":
                    losses = parts.vertical.run(forward_loss, walking, gradients)
                else:
                    losses = run_horizontally(parts.walk, parts.weights, parts.order, forward_loss, walking, gradients)
            except BaseException as error:
                self._step.give_up(error)
                raise
        self._step.micro_steps += num_micro_batches
        return self._step.take([float(loss) for loss in losses], shares)

    # Horizontal, as users know it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: the next micro-batch of a step in training mode with gradients, an evaluation otherwise.

        `engine.backward(loss)` and `loss.backward()` do the same: gradients are divided by the number of micro-batches.
        """
        return self._loop.forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backpropagate the loss of one micro-batch, divided by the number of micro-batches and times the loss scale.

        Returns the divided loss, unscaled. With `retain_graph` another backward may go through the same forward pass, which
        is one micro-batch all the same. Without `scale_wrt_gas` nothing is divided: gradients of micro-batches are summed.
        An exception discards the step: part of the gradient was summed already. Over several ranks it ends the group.
        """
        return self._loop.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by the micro-batches of all ranks and times the loss scale, for `scaled.backward()`.

        Plain `loss.backward()` is right without it; but in fp16 what is computed between the module's output and the loss
        then runs backward unscaled. All that one backward goes through must be scaled, or nothing.
        """
        return self._loop.scale(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` takes an optimizer step: every micro-batch has run backward."""
        return self._step.passes.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether `step` takes an optimizer step, instead of counting backward passes; None counts again.

        What gradients are divided by stays the configured number of micro-batches.
        """
        self._step.passes.say(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only sum gradients inside the block: the step's last micro-batch, and `step`, come after it.

        Raises IllegalTransition where each micro-batch is summed over ranks by itself.
        """
        if self._parts.walk.sums.publishes_micro_batches:
            raise IllegalTransition(
                "no_sync was entered, but gradients are summed over ranks after every micro-batch.",
                remedy='Set infinity.gradient_reduction to "boundary": whole gradients are kept until the step then.',
            )
        return self._step.passes.hold_back("no_sync")

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Sum the gradients of all backward passes inside the block, whatever their number; the next `step` takes the step.

        What a loss is divided by stays the configured number of micro-batches.
        """
        return self._step.passes.close_step_after()

    def step(self) -> None:
        """Take the optimizer step at the boundary of a step's micro-batches; before it, do nothing."""
        self._loop.step()

    def zero_grad(self) -> None:
        """Discard the step that was begun, if any: its forward passes, and what their backward passes have summed.

        Raises IllegalTransition while the module runs.
        """
        self._loop.zero_grad()

    # State

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self._parts.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode; engine(...) then runs without gradients."""
        return self.train(False)

    def synchronize(self) -> None:
        """Make every pending update and wait until all of it is in its tier. Every rank calls it."""
        self._step.require_usable()
        with self._step.failing_on_io():
            self._parts.updater.drain()
            self._parts.weights.settle()

    def finish_gradients(self) -> None:
        """Make the gradients of a step final before `step` does, so that they may be read and set. Every rank calls it.

        Raises IllegalTransition before the last backward of the step.
        """
        self._loop.finish_gradients()

    def require_no_graph(self, call: str) -> None:
        """Raise IllegalTransition while a backward is to come whose forward has used the weights."""
        self._loop.require_no_graph(call)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fp32 master value on the CPU) of every parameter, one at a time; every rank runs to the end."""
        self.synchronize()
        yield from self._parts.persistence.full_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all fp32 master values and the module's buffers, for models that fit in memory; tied names included.

        Every rank calls it and gets them.
        """
        self.synchronize()
        return self._parts.persistence.state_dict()

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """The same as `state_dict()`."""
        return self.state_dict()

    def save_checkpoint(
        self, directory: str | Path, tag: str | None = None, client_state: Mapping[str, object] | None = None,
        *, keep: int | None = None,
    ) -> Path:  # fmt: skip
        """Write `<directory>/step-<n>`, with a tag `<directory>/<tag>/step-<n>`, and return its path.

        `client_state` is JSON-able and comes back from `load_checkpoint`. With `keep`, only the newest that many complete
        ones remain there, unless this one had to be committed in place. Every rank calls it; rank 0 writes, with its own
        `client_state` and buffers. Raises CheckpointError, SwapSpaceError, on every rank.
        """
        self.synchronize()
        steps = StepCounts(self._step.global_steps, self._step.skipped_steps)
        return self._parts.persistence.save(Path(directory), tag, steps, extra=dict(client_state or {}), keep=keep)

    def load_checkpoint(self, path: str | Path, tag: str | None = None) -> LoadedCheckpoint:
        """Load a checkpoint and return (its path, its client_state).

        `path` is its own directory, or one that `save_checkpoint` was given: then of this tag, else of the tag saved last,
        the newest complete one. Every rank reads it, whatever number of them saved it. Raises CheckpointError and its kinds;
        then the state is as before, or the engine FAILED where part of it was replaced already. Raises IllegalTransition in
        the middle of a step of the familiar loop.
        """
        self._step.begin_anew("load_checkpoint")
        self.synchronize()
        persistence = self._parts.persistence
        try:
            with self._step.failing_on_io():
                restored = persistence.load(Path(path), tag)
        except BaseException as error:
            if persistence.is_torn:
                self._step.fail(error)
            raise
        self._step.global_steps, self._step.skipped_steps = restored.steps.taken, restored.steps.skipped
        self._parts.randomness.step = self._step.global_steps
        return LoadedCheckpoint(restored.path, restored.extra)

    def memory_report(self) -> tuple[LedgerLine, ...]:
        """Return used and peak bytes for each tier and owner."""
        return self._parts.ledger.report()

    def close(self) -> None:
        """Wait for what is in flight, remove the swap files, and give all memory back. Closing twice is fine.

        Raises StorageError for what was in flight, unless the engine has FAILED with one before.
        The module gets its own forward back; its weights are gone unless they were saved.
        """
        if self._step.lifecycle.state is EngineState.CLOSED:
            return
        has_failed = self._step.lifecycle.state is EngineState.FAILED
        self._step.lifecycle.to(EngineState.CLOSED)
        try:
            self._parts.resources.close()
        except StorageError:
            if not has_failed:
                raise

    def destroy(self) -> None:
        """The same as `close()`."""
        self.close()

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> object:
            raise missing("engine", name)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._parts.group.size > 1:  # others would wait for this rank
            self._parts.group.fail(reason_words(error))
        self.close()
