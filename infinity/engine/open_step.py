"""The step that an engine is in: which calls are legal now, how it is taken, how it is discarded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.engine.lifetime import ENDS, MOVES, EngineState, FailsOnIo
from infinity.engine.parts import EngineParts
from infinity.engine.passes import Passes
from infinity.engine.ranks import reason_words
from infinity.engine.results import StepResult, step_result
from infinity.errors import ConfigError, Diverged, IllegalTransition, ModelError
from infinity.states import Lifecycle


class OpenStep:
    """What `train_batch` and the familiar loop share. One for the life of an engine; `passes` says how far the step is."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.lifecycle = Lifecycle("engine", EngineState.READY, MOVES)
        self.passes = Passes(parts.batch.num_micro_batches)
        self.was_applied = False  # the step before
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.last_grad_norm: float | None = None

    # Which calls are legal

    def require_usable(self) -> None:
        """Raise IllegalTransition when the engine has failed or is closed."""
        if self.lifecycle.state in ENDS:
            raise IllegalTransition(
                f"The engine is {self.lifecycle.state.name}.", remedy="Make a new one and load its last checkpoint."
            )

    def require_idle(self, call: str) -> None:
        """Raise IllegalTransition while the module runs."""
        is_in_train_batch = self.lifecycle.state is not EngineState.READY and not self.passes.num_forwards
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_train_batch or is_in_backward or self.parts.walk.micro_batch is not None:
            raise IllegalTransition(
                f"{call} was called while the engine's own module runs.", remedy="Call it when the step before is done."
            )

    def begin_anew(self, call: str) -> None:
        """Require that no gradient waits for a step; forward passes that no backward followed are forgotten."""
        self.require_usable()
        self.require_idle(call)
        self.forget_failed_backward()
        self.passes.require_none_waiting(call)
        if self.passes.num_forwards:
            self.abandon()

    def failing_on_io(self) -> FailsOnIo:
        """Return the block in which an error of storage, memory or between ranks ends the engine."""
        return FailsOnIo(self.lifecycle, self.parts.group)

    # How it goes on and ends

    def begin_forward(self) -> None:
        """A micro-batch of the step runs forward."""
        self.require_usable()
        self.lifecycle.to(EngineState.FORWARD)
        self.parts.randomness.step = self.global_steps
        self.parts.group.begin_step(self.global_steps + 1)

    def take(self, losses: list[float], shares: Sequence[float]) -> StepResult:
        """Take the step: its gradients are final. After ConfigError and Diverged it is discarded."""
        parts = self.parts
        self.lifecycle.to(EngineState.STEPPING)
        counters = parts.recorder.take_counters()  # before the update begins: what it moves is the next step's
        try:
            with self.failing_on_io():
                update = parts.updater.step(losses, shares)
        except (ConfigError, Diverged, ModelError):  # before anything was touched, and on every rank
            self.abandon()
            raise
        except BaseException as error:
            self.fail(error)  # an interrupt, too: part of the update is made, or will be
            raise
        parts.activations.book()
        self.global_steps += 1
        self.skipped_steps += update.skipped
        self.last_grad_norm = update.grad_norm
        self.was_applied = not update.skipped
        self.passes.forget()
        self.lifecycle.to(EngineState.READY)
        return step_result(self.global_steps, update, counters)

    def give_up(self, error: BaseException) -> None:
        """Forget a step that an exception has ended. Where others wait for this rank it cannot go on: they are told."""
        if self.parts.group.size == 1:
            self.abandon()
            return
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The states are not those of one moment any more, or others wait for this rank in vain: only `close` is legal."""
        if self.lifecycle.state not in ENDS:
            self.lifecycle.to(EngineState.FAILED)
        self.parts.group.fail(reason_words(error))

    def abandon(self) -> None:
        """Forget the step: its forward passes and what was summed. The states are those of the step before."""
        self.parts.walk.end()
        with self.failing_on_io():
            self.parts.walk.sums.give_up()
            self.parts.updater.discard()
        self.passes.forget()
        if self.lifecycle.state not in (EngineState.READY, *ENDS):
            self.lifecycle.to(EngineState.READY)

    def forget_failed_backward(self) -> None:
        """Discard the step if a plain `loss.backward()` failed: part of its gradient was summed already."""
        if self.passes.has_failed:
            self.give_up(IllegalTransition("A backward of this rank had failed."))
