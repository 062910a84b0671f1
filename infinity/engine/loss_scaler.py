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

    @property
    def scale(self) -> float:
        """The scale of the next step."""
        return self.state.scale

    def backpropagate(self, loss: torch.Tensor, num_micro_batches: int) -> None:
        """Run backward of one micro-batch's loss, divided by their number and scaled from its first gradient on."""
        gradient = None if loss.numel() != 1 else scaled(loss, 1.0 / num_micro_batches * self.scale)
        self.is_in_loss = gradient is not None  # of more elements, torch says what is missing
        try:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
        finally:
            self.is_in_loss = False

    def factor_left(self, num_micro_batches: int) -> float:
        """Return what gradients that enter the module have still to be multiplied by."""
        return 1.0 if self.is_in_loss else 1.0 / num_micro_batches * self.scale

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
