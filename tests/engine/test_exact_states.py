"""Gradients, masters, moments and learning rates of the familiar loop, on one rank, by conformance_states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import conformance_states as checks
import pytest

TIERS = [("nvme", "nvme"), pytest.param(("cpu", "cpu"), marks=pytest.mark.slow)]
CHECKS = [
    checks.unbalanced_gradients,
    checks.edited_states,
    checks.one_rank_overflows,
    checks.loss_scale_sequence,
    checks.norm_over_a_change_of_scale,
    checks.evaluation_in_between,
    checks.gathered_writes,
]


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("model", checks.MODELS)
def test_every_element_is_torchs(model: str, tiers: tuple[str, str], nvme: Path) -> None:
    """C72: gradients, masters and moments of odd sizes, tied and frozen parameters, element by element."""
    checks.exact_gradients(str(nvme), model=model, optim=tiers[0], params=tiers[1])


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_states_follow_torch(check: Callable[..., None], tiers: tuple[str, str], nvme: Path) -> None:
    """C75, C77, C79, C83, C86, C94, C100: what each check says, in RAM and on NVMe."""
    check(str(nvme), optim=tiers[0], params=tiers[1])


def test_learning_rates_are_those_of_the_formula(nvme: Path) -> None:
    """C84: by applied step alone: logarithmic warm-up of three steps for each group, then a straight line to 0."""
    rates = checks.learning_rates(str(nvme))
    shares = [0.0, 0.6309297535714575, 1.0, 1.0, 2 / 3, 1 / 3]
    assert rates == [pytest.approx([0.1 * share, 0.2 * share]) for share in shares]


@pytest.mark.slow
def test_counters_of_a_long_run_in_bf16(nvme: Path) -> None:
    """C59: more than 256 steps in bf16, on NVMe."""
    checks.long_run_in_bf16(str(nvme), optim="nvme", params="nvme")
