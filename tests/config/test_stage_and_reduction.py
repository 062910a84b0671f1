"""The stage and the moment of reduction: what may be asked for, and what has no effect."""

from __future__ import annotations

import pytest

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.placement import Placement


@pytest.mark.parametrize("zero", [{}, {"stage": "auto"}, {"stage": None}])
def test_no_stage_leaves_the_choice_to_the_planner(zero: dict[str, object]) -> None:
    """A stage that is absent, null or "auto" is none; one that is given reaches the placement."""
    assert Placement.from_config(Config.from_any({"zero_optimization": zero})).stage is None
    assert Placement.from_config(Config.from_any({"zero_optimization": {"stage": 2}})).stage == 2


def test_a_stage_that_does_not_exist_is_refused() -> None:
    """The error names the key and the value."""
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage.*4"):
        Config.from_any({"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize(("schedule", "has_note"), [("vertical", True), ("horizontal", False)])
def test_reducing_each_micro_batch_counts_in_the_familiar_loop_alone_under_vertical_order(
    schedule: str, has_note: bool
) -> None:
    """There a unit is reduced once a step, and a line says so."""
    config = Config.from_any({"infinity": {"schedule": schedule, "gradient_reduction": "micro_batch"}})
    assert any(note.startswith("infinity.gradient_reduction: counts in the loop") for note in config.notes()) == has_note


def test_an_unknown_reduction_is_refused() -> None:
    """Only the two words are known."""
    with pytest.raises(ConfigError, match="gradient_reduction"):
        Config.from_any({"infinity": {"gradient_reduction": "sometimes"}})
