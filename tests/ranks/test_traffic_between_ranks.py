"""Bytes through the collectives in a step, as the program counts them: elements x bytes x (N - 1) / N, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import settings
from rank_pool import RankPool
from rank_sizes import NUM_STEPS, Sizes, train_bulk

NUM_LAYERS = 7
WIDTH = 48  # of a layer of 2,304 elements: 2, 3 and 4 equal parts without padding
NUM_ELEMENTS = NUM_LAYERS * WIDTH * WIDTH
WEIGHT_BYTES, SUM_BYTES, GRADIENT_BYTES = 2, 4, 2  # bf16, reduced in fp32, rounded once
NUM_SLOTS = 2
NUM_RANKS = (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))


def crossing(num_ranks: int, num_elements: int, element_bytes: int) -> int:
    """Return the bytes that each rank sends and receives to gather or reduce so many elements."""
    return num_elements * element_bytes * (num_ranks - 1) // num_ranks


def measured(
    ranks: RankPool,
    nvme: Path,
    num_ranks: int,
    *,
    stage: int,
    optim: str = "nvme",
    num_micro_batches: int = 1,
    **own: object,
) -> list[Sizes]:
    """Return what each rank counted; weights of stage 3 live on NVMe."""
    params = "nvme" if stage == 3 else "cpu"
    config = settings(
        nvme, optim=optim, params=params, num_micro_batches=num_micro_batches, check=False, weight_slots=NUM_SLOTS, **own
    )
    config["zero_optimization"]["stage"] = stage
    return ranks.run(num_ranks, train_bulk, config=config, width=WIDTH, num_layers=NUM_LAYERS)


def require_bytes(sizes: Sizes, *, gathered: int, reduced: int) -> None:
    """Fail unless these bytes crossed in each step, the plan has foreseen them, and nothing was broadcast."""
    assert sizes.counters.get("all_gather_bytes", 0) == NUM_STEPS * gathered
    assert sizes.counters.get("reduce_scatter_bytes", 0) == NUM_STEPS * reduced
    assert sizes.counters.get("broadcast_bytes", 0) == 0
    foreseen = sizes.planned_traffic
    assert foreseen["gradients reduced"] == reduced
    assert foreseen.get("weights gathered", 0) + foreseen.get("gradients gathered", 0) == gathered


def gathers_of_stage_3(num_passes: int) -> int:
    """Return how many units are gathered in a step: twice in each pass, but for those in the two slots where the way turns.

    It turns in every pass from forward to backward, and between passes back to forward. With the next step the weights
    are new, so there is nothing left to be found.
    """
    return 2 * num_passes * NUM_LAYERS - NUM_SLOTS * (2 * num_passes - 1)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_stage_0_moves_2p(num_ranks: int, num_micro_batches: int, ranks: RankPool, nvme: Path) -> None:
    """Gradients are reduced once a step, and what was reduced is gathered."""
    gathered = crossing(num_ranks, NUM_ELEMENTS, GRADIENT_BYTES)
    reduced = crossing(num_ranks, NUM_ELEMENTS, SUM_BYTES)
    for sizes in measured(ranks, nvme, num_ranks, stage=0, num_micro_batches=num_micro_batches):
        require_bytes(sizes, gathered=gathered, reduced=reduced)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_stages_1_and_2_move_2p(num_ranks: int, stage: int, num_micro_batches: int, ranks: RankPool, nvme: Path) -> None:
    """Gradients are reduced once a step, and new weights gathered."""
    gathered = crossing(num_ranks, NUM_ELEMENTS, WEIGHT_BYTES)
    reduced = crossing(num_ranks, NUM_ELEMENTS, SUM_BYTES)
    for sizes in measured(ranks, nvme, num_ranks, stage=stage, num_micro_batches=num_micro_batches):
        require_bytes(sizes, gathered=gathered, reduced=reduced)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_stage_3_moves_3p_for_any_number_of_micro_batches(
    num_ranks: int, num_micro_batches: int, ranks: RankPool, nvme: Path
) -> None:
    """Weights are gathered in both directions, but for the units in the two slots where a pass turns; one reduction."""
    gathered = crossing(num_ranks, NUM_ELEMENTS // NUM_LAYERS, WEIGHT_BYTES) * gathers_of_stage_3(1)
    reduced = crossing(num_ranks, NUM_ELEMENTS, SUM_BYTES)
    for sizes in measured(ranks, nvme, num_ranks, stage=3, num_micro_batches=num_micro_batches):
        require_bytes(sizes, gathered=gathered, reduced=reduced)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_horizontal_stage_3_moves_3p_for_every_micro_batch(num_ranks: int, ranks: RankPool, nvme: Path) -> None:
    """Each micro-batch gathers the weights in both directions, but for the turns, and reduces its gradients."""
    num_micro_batches = 4
    gathered = crossing(num_ranks, NUM_ELEMENTS // NUM_LAYERS, WEIGHT_BYTES) * gathers_of_stage_3(num_micro_batches)
    reduced = crossing(num_ranks, NUM_ELEMENTS, SUM_BYTES) * num_micro_batches
    for sizes in measured(ranks, nvme, num_ranks, stage=3, num_micro_batches=num_micro_batches, schedule="horizontal"):
        require_bytes(sizes, gathered=gathered, reduced=reduced)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_reduction_a_step_can_be_asked_for(stage: int, ranks: RankPool, nvme: Path) -> None:
    """`gradient_reduction` makes the choice explicit: in horizontal order, boundary reduces P, micro_batch 4 P."""
    for reduction, times in (("boundary", 1), ("micro_batch", 4)):
        sizes = measured(
            ranks, nvme, 2, stage=stage, num_micro_batches=4, schedule="horizontal", gradient_reduction=reduction
        )[0]
        assert sizes.counters["reduce_scatter_bytes"] == NUM_STEPS * times * crossing(2, NUM_ELEMENTS, SUM_BYTES)
