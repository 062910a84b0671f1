"""The loss scale of fp16 training: its rules and its state as frozen values, its transitions as pure functions.

fp16 holds nothing below 6e-8, where many gradients are. So the loss is multiplied by the scale before backward, and the
update multiplies the gradient by its reciprocal. A dynamic scale is about the largest that the last steps bore (Micikevicius
et al., 2018); keys and rules are those of DeepSpeed's section `fp16`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_FACTOR = 2.0  # a power of two: scaling by it rounds nothing
_LARGEST = 2.0**126  # its reciprocal is still a normal fp32 number


@dataclass(frozen=True, slots=True)
class LossScaleRules:
    """What the scale begins with, and how it moves. Static: it stays what it is."""

    initial: float = 1.0
    is_dynamic: bool = False
    window: int = 1000  # finite steps in a row after which it is doubled
    hysteresis: int = 2  # overflows until it is halved: the first ones are taken for accidents
    consecutive_hysteresis: bool = False  # a finite step restores the hysteresis; otherwise a doubling does
    minimum: float = 1.0

    def first(self) -> LossScale:
        """Return the state before the first step."""
        return LossScale(self.initial, self.hysteresis, 0)


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of the next step, and what its rules count."""

    scale: float
    hysteresis_left: int  # overflows until the scale is halved, at least 1
    num_finite_steps: int  # in a row, since it was doubled last


def after_finite(state: LossScale, rules: LossScaleRules) -> LossScale:
    """Return the state after a step whose gradient was finite."""
    if not rules.is_dynamic:
        return state
    if state.num_finite_steps + 1 >= rules.window:
        return LossScale(min(state.scale * _FACTOR, _LARGEST), rules.hysteresis, 0)
    hysteresis_left = rules.hysteresis if rules.consecutive_hysteresis else state.hysteresis_left
    return LossScale(state.scale, hysteresis_left, state.num_finite_steps + 1)


def after_overflow(state: LossScale, rules: LossScaleRules) -> LossScale | None:
    """Return the state after a step whose gradient was not finite; None where a dynamic scale is at its minimum already."""
    if not rules.is_dynamic:
        return state
    if state.hysteresis_left > 1:
        return replace(state, hysteresis_left=state.hysteresis_left - 1, num_finite_steps=0)
    if state.scale <= rules.minimum:
        return None
    return replace(state, scale=max(state.scale / _FACTOR, rules.minimum), num_finite_steps=0)
