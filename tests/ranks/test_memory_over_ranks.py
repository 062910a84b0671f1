"""Memory of each rank: what the plan says, and what a stage partitions falls as one over the ranks."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from kit import settings
from matrix_cells import STAGES
from rank_pool import RankPool
from rank_sizes import Sizes, load_bulk, train_bulk

NUM_LAYERS, WIDTH = 12, 256
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH
NUM_RANKS = (1, 2, 4)
MEASURED = ("activations", "root", "gradient accumulators")  # what torch allocates, not a formula
MIB = 1 << 20


@pytest.fixture(scope="module")
def sizes_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Return a function from ranks and stage to what rank 0 measured, everything in RAM in bf16, one micro-batch."""
    nvme = tmp_path_factory.mktemp("nvme")

    @cache
    def sizes(num_ranks: int, stage: int, optim: str = "cpu", params: str = "cpu") -> tuple[Sizes, ...]:
        config = settings(nvme, optim=optim, params=params, check=False, tile_bytes="64KiB")
        config["zero_optimization"]["stage"] = stage
        return tuple(ranks.run(num_ranks, train_bulk, config=config, width=WIDTH, num_layers=NUM_LAYERS))

    return sizes


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ledger_peaks_are_those_of_the_plan(num_ranks: int, stage: int, sizes_of) -> None:  # type: ignore[no-untyped-def]
    """C43: on every rank each owner's peak is the plan's within 5 %, for every stage."""
    for sizes in sizes_of(num_ranks, stage):
        for owner, planned in sizes.planned.items():
            if owner not in MEASURED:
                assert sizes.peaks.get(owner, 0) == pytest.approx(planned, rel=0.05), owner


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_what_a_stage_partitions_falls_as_one_over_ranks(num_ranks: int, sizes_of) -> None:  # type: ignore[no-untyped-def]
    """C43: optimizer state from stage 1, gradients from 2, weights from 3: 10, 2 and 2 bytes a parameter, over the ranks."""
    by_stage = [sizes_of(num_ranks, stage)[0].peaks for stage in STAGES]
    share = NUM_PARAMETERS / num_ranks
    assert by_stage[0]["optimizer state"] == pytest.approx(10 * NUM_PARAMETERS, rel=0.05)
    for peaks in by_stage[1:]:
        assert peaks["optimizer state"] == pytest.approx(10 * share, rel=0.05)
    assert by_stage[0]["gradients"] == pytest.approx(2 * NUM_PARAMETERS, rel=0.05)
    for peaks in by_stage[2:]:
        assert peaks["gradients"] == pytest.approx(2 * share, rel=0.05)
    for peaks in by_stage[:3]:
        assert peaks["weights"] >= 2 * NUM_PARAMETERS
    assert by_stage[3]["weights"] == pytest.approx(2 * share, rel=0.05)


def test_sums_of_micro_batches_fall_too_where_each_is_reduced(ranks: RankPool, nvme: Path) -> None:
    """Horizontal order with four micro-batches: fp32 sums are whole in stage 1, and a part of them in stages 2 and 3."""
    found = {}
    for stage in (1, 2, 3):
        config = settings(nvme, num_micro_batches=4, schedule="horizontal", check=False, tile_bytes="64KiB")
        config["zero_optimization"]["stage"] = stage
        found[stage] = ranks.run(2, train_bulk, config=config, width=WIDTH, num_layers=NUM_LAYERS)[0].peaks["gradients"]
    assert found[1] == pytest.approx(4 * NUM_PARAMETERS, rel=0.05)
    assert found[2] == pytest.approx(2 * NUM_PARAMETERS, rel=0.05)
    assert found[3] == pytest.approx(2 * NUM_PARAMETERS, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loading_a_model_costs_a_constant_for_each_rank(tmp_path: Path) -> None:
    """The sum over ranks of peak PSS above an idle process: a rank more adds what its process needs, whatever the model.

    Four times the layers add their weights once, and to what a rank costs a tenth of them at most.
    """
    width, few, many = 1024, 20, 80
    config = settings(tmp_path, optim="nvme", params="cpu", check=False, tile_bytes="1MiB", cpu_memory="2GiB")
    config["zero_optimization"]["stage"] = 3
    totals = {}
    for num_layers, num_ranks in product((few, many), (1, 3)):
        pool = RankPool()  # of processes that nothing has warmed up
        try:
            peaks = pool.run(num_ranks, load_bulk, config=config, width=width, num_layers=num_layers, seconds=240)
        finally:
            pool.close()
        totals[num_layers, num_ranks] = sum(peaks)
    each = {num_layers: (totals[num_layers, 3] - totals[num_layers, 1]) / 2 for num_layers in (few, many)}
    added_bytes = 2 * (many - few) * width * width
    assert totals[many, 1] - totals[few, 1] > added_bytes, totals
    assert each[many] - each[few] < 0.1 * added_bytes, totals
    assert each[many] < 256 * MIB, totals
