"""The loss scale of an engine: the state that steps move, made from the configuration, kept in checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from infinity.config import Config
from infinity.errors import CheckpointError
from infinity.optim.loss_scale import LossScale, LossScaleRules, after_finite, after_overflow
from infinity.zero.tail import scaled


@dataclass(slots=True)
class LossScaler:
    """What losses are multiplied by; 1 in fp32 and bf16 runs. Moves once with every step that is decided."""

    rules: LossScaleRules
    state: LossScale
    is_in_loss: bool = False  # whether the backward that runs began with a scaled gradient
    scaled_backward: int = -1  # autograd's number of the last backward that went through a loss which `factor` scales

    @property
    def scale(self) -> float:
        """The scale of the next step."""
        return self.state.scale

    def factor(self, share: float) -> float:
        """Return what a loss is multiplied by; `share` is its weight in the mean over the step's micro-batches."""
        return share * self.scale

    def backpropagate(self, loss: torch.Tensor, share: float, *, retain_graph: bool) -> None:
        """Run backward of one micro-batch's loss, multiplied by `factor` from its first gradient on."""
        gradient = None if loss.numel() != 1 else scaled(loss, self.factor(share))
        self.is_in_loss = gradient is not None  # of more elements, torch says what is missing
        try:
            loss.backward(gradient, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self.is_in_loss = False

    def factor_of_loss(self, share: float) -> float:
        """Return what the gradient of a scaled loss is multiplied by in the backward that runs: by `factor`, but once."""
        if self.is_in_loss:
            return 1.0
        self.scaled_backward = torch._C._current_graph_task_id()
        return self.factor(share)

    def factor_left(self, share: float) -> float:
        """Return what gradients that enter the module have still to be multiplied by in the backward that runs."""
        is_scaled = self.is_in_loss or self.scaled_backward == torch._C._current_graph_task_id()
        return 1.0 if is_scaled else self.factor(share)

    def applied(self) -> None:
        """Register a step with a finite gradient."""
        self.state = after_finite(self.state, self.rules)

    def overflowed(self) -> bool:
        """Register a step without one; return False where nothing is left to try: at the minimum, where nothing moves."""
        state = after_overflow(self.state, self.rules)
        if state is None:
            return False
        self.state = state
        return True

    def record(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None where it never moves."""
        return asdict(self.state) if self.rules.is_dynamic else None

    def recorded(self, record: object) -> LossScale:
        """Return the state to go on with from a checkpoint's record: the first one without a record or a dynamic scale.

        Raises CheckpointError for what is no record.
        """
        if record is None or not self.rules.is_dynamic:
            return self.rules.first()
        return _read(record)


def build_loss_scaler(config: Config) -> LossScaler:
    """Return the scaler that the configuration describes."""
    rules = LossScaleRules()
    if config.fp16.enabled:
        section = config.fp16
        rules = LossScaleRules(
            initial=section.loss_scale or 2.0**section.initial_scale_power,
            is_dynamic=not section.loss_scale,
            window=section.loss_scale_window,
            hysteresis=section.hysteresis,
            consecutive_hysteresis=section.consecutive_hysteresis,
            minimum=section.min_loss_scale,
        )
    return LossScaler(rules, rules.first())


def _read(record: object) -> LossScale:
    if isinstance(record, dict):
        scale, left, num_finite = (record.get(name) for name in ("scale", "hysteresis_left", "num_finite_steps"))
        if isinstance(scale, int | float) and isinstance(left, int) and isinstance(num_finite, int):
            return LossScale(float(scale), left, num_finite)
    raise CheckpointError(f"The checkpoint's loss scale is damaged: {record!r}.")
