"""Sums on NVMe over ranks: a unit's sum goes into its reduction while the part of the unit before comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import settings
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
        ranks.run(2, train_with_gradients_on, tier=tier, kit="tiny-gpt", config=config, seconds=40.0)
        for tier in ("cpu", "nvme")
    )
    for one, other in zip(expected, found, strict=True):
        assert (one.losses, one.weights, one.moments) == (other.losses, other.weights, other.moments)
        assert (one.facts["slots"], other.facts["slots"]) == (0, num_slots)
