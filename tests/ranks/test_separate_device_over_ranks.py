"""Ranks whose compute device has memory of its own: three tiers, and the bits of ranks that compute on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import require_same_bits
from matrix_cells import Cell, Tier
from rank_episodes import train_on_separate_device
from rank_pool import RankPool
from rank_training import asked_of, train


@pytest.mark.parametrize("late", [pytest.param(False, id="at once", marks=pytest.mark.slow), pytest.param(True, id="late")])
@pytest.mark.parametrize(
    ("stage", "optim", "params"),
    [
        (0, "cpu", "none"),
        (1, "nvme", "none"),
        (2, "cpu", "none"),
        (3, "cpu", "none"),
        (3, "nvme", "cpu"),
        (3, "nvme", "nvme"),
    ],
)
def test_three_tiers_have_the_bits_of_two(
    stage: int, optim: Tier, params: Tier, late: bool, ranks: RankPool, nvme: Path
) -> None:
    """Weights on the device, in RAM or on NVMe, whenever copies end: losses and weights are those of stage 0 on the CPU."""
    cell = Cell(2, "bf16", stage, optim, params, 2, "vertical")
    runs = ranks.run(2, train_on_separate_device, asked=asked_of(cell, nvme, 3), late=late)
    require_same_bits(runs, ranks.run(2, train, asked=asked_of(cell.oracle, nvme, 3)))
