"""The loss scale moves by the documented rules: doubled after a window, halved by overflows, stopped at its minimum."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.optim.loss_scale import LossScale, LossScaleRules, after_finite, after_overflow

RULES = LossScaleRules(initial=256.0, is_dynamic=True, window=2, hysteresis=1, minimum=1.0)


def follow(rules: LossScaleRules, steps: str, state: LossScale | None = None) -> list[float | None]:
    """Return the scale after each step, "." finite or "!" not; None and an end where nothing is left to try."""
    state = state or rules.first()
    scales: list[float | None] = []
    for step in steps:
        moved = after_finite(state, rules) if step == "." else after_overflow(state, rules)
        scales.append(None if moved is None else moved.scale)
        if moved is None:
            break
        state = moved
    return scales


@dataclass
class Clock:
    """The rules once more, told by the number of the step: windows are counted from the last overflow."""

    rules: LossScaleRules
    scale: float
    patience: int
    now: int = 0
    last_overflow: int = -1

    def step(self, finite: bool) -> float | None:
        rules = self.rules
        if finite:
            if rules.consecutive_hysteresis:
                self.patience = rules.hysteresis
            if (self.now - self.last_overflow) % rules.window == 0:
                self.patience = rules.hysteresis
                self.scale = min(2 * self.scale, 2.0**126)
        else:
            self.last_overflow = self.now
            if self.patience > 1:
                self.patience -= 1
            elif self.scale == rules.minimum:
                return None
            else:
                self.scale = max(self.scale / 2, rules.minimum)
        self.now += 1
        return self.scale


@given(
    st.builds(
        LossScaleRules, initial=st.sampled_from([2.0**power for power in range(1, 127, 5)]), is_dynamic=st.just(True),
        window=st.integers(1, 5), hysteresis=st.integers(1, 4), consecutive_hysteresis=st.booleans(),
        minimum=st.sampled_from([0.25, 1.0, 1.5]),
    ),
    st.text(".!", max_size=60),
)  # fmt: skip
def test_every_course_is_that_of_the_rules(rules: LossScaleRules, steps: str) -> None:
    """Any order of finite and other steps: the scales are those of a second telling of the rules."""
    clock, expected = Clock(rules, rules.initial, rules.hysteresis), []
    for step in steps:
        expected.append(clock.step(step == "."))
        if expected[-1] is None:
            break
    assert follow(rules, steps) == expected


def test_a_window_of_finite_steps_doubles() -> None:
    """Two finite steps double it, and two more; an overflow begins the window anew."""
    assert follow(RULES, "....") == [256, 512, 512, 1024]
    assert follow(RULES, ".!..") == [256, 128, 128, 256]


def test_overflows_halve_down_to_the_minimum() -> None:
    """Each overflow halves it; at the minimum, which need be no power of two, nothing is left to try."""
    assert follow(RULES, "!" * 9) == [128, 64, 32, 16, 8, 4, 2, 1, None]
    rules = LossScaleRules(initial=4.0, is_dynamic=True, window=2, hysteresis=1, minimum=1.5)
    assert follow(rules, "!!!") == [2, 1.5, None]


def test_hysteresis_forgives_the_first_overflows() -> None:
    """Of two overflows the second halves, and every one after it, until a doubling restores the hysteresis."""
    rules = LossScaleRules(initial=256.0, is_dynamic=True, window=2, hysteresis=2)
    assert follow(rules, "!!!.!") == [256, 128, 64, 64, 32]
    assert follow(rules, "!!..!!") == [256, 128, 128, 256, 256, 128]


def test_consecutive_hysteresis_is_restored_by_any_finite_step() -> None:
    """Overflows count as accidents again after one finite step."""
    rules = LossScaleRules(initial=256.0, is_dynamic=True, window=9, hysteresis=2, consecutive_hysteresis=True)
    assert follow(rules, "!.!.!!") == [256, 256, 256, 256, 256, 128]


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_static_scale_stays(scale: float) -> None:
    """Nothing moves it, at any number of steps."""
    rules = LossScaleRules(initial=scale)
    assert set(follow(rules, ".!" * 2000)) == {scale}


def test_it_does_not_grow_out_of_fp32() -> None:
    """Where every gradient is zero it stays at the largest power of two with a normal reciprocal."""
    rules = LossScaleRules(initial=2.0**125, is_dynamic=True, window=1)
    assert follow(rules, "...") == [2.0**126] * 3
