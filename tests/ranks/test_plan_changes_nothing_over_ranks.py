"""Choices of the plan over ranks that change nothing: where sums wait, and which weights stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import settings
from rank_checkpoints import train_through
from rank_pool import RankPool
from spilled_errand import train_with_gradients_on


@pytest.mark.parametrize(
    ("stage", "reduction", "num_slots"), [(1, "boundary", 2), (3, "boundary", 2), (2, "micro_batch", 1)]
)
def test_spilled_sums_have_the_bits_of_those_in_memory(
    stage: int, reduction: str, num_slots: int, ranks: RankPool, nvme: Path
) -> None:
    """Losses, weights and moments are the same, and no rank waits for a slot that only it could give back."""
    config = settings(nvme, num_micro_batches=2, schedule="horizontal", gradient_reduction=reduction)
    config["zero_optimization"]["stage"] = stage
    expected, found = (
        ranks.run(2, train_with_gradients_on, tier=tier, kit="tiny-gpt", config=config, seconds=150.0)
        for tier in ("cpu", "nvme")
    )
    for one, other in zip(expected, found, strict=True):
        assert (one.losses, one.weights, one.moments) == (other.losses, other.weights, other.moments)
        assert (one.facts["slots"], other.facts["slots"]) == (0, num_slots)


def test_small_units_that_stay_whole_have_the_bits_of_gathered_ones(ranks: RankPool, nvme: Path) -> None:
    """In stage 3 with blocks below the threshold, and the larger embedding gathered: losses, weights and moments."""
    config = settings(nvme, num_micro_batches=2)
    config["zero_optimization"]["stage"] = 3
    few = {**config, "zero_optimization": {**config["zero_optimization"], "stage3_param_persistence_threshold": 9216}}
    expected, found = (ranks.run(2, train_through, kit="tiny-gpt", config=one, num_steps=3) for one in (config, few))
    assert found == expected
