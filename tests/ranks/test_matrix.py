"""The pruned matrix: every two choices of stage, tier, accumulation, ranks, precision, schedule and reduction meet once.

The whole of it is in test_whole_matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import REFERENCE, TOLERANCES, MatrixRuns, require_near, require_same_bits
from matrix_cells import NUM_MICRO_BATCHES, NUM_RANKS, PRECISIONS, STAGES, Cell, all_cells, chosen_reductions, pairwise
from rank_pool import RankPool

NUM_STEPS = 3
PRUNED = pairwise(all_cells() + chosen_reductions())


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MatrixRuns]:
    """Runs of this module, each made once."""
    directory: Path = tmp_path_factory.mktemp("nvme")
    yield MatrixRuns(ranks, str(directory), NUM_STEPS)
    assert list(directory.iterdir()) == []  # no run leaves anything behind


@pytest.mark.parametrize("cell", PRUNED, ids=str)
def test_cell_has_the_bits_of_stage_0_in_ram(cell: Cell, runs: MatrixRuns) -> None:
    """C71, C72, C88, C89: equal ranks, precision and moments of reduction: equal losses, norms and weights, bit for bit."""
    require_same_bits(runs.of(cell), runs.of(cell.oracle))


@pytest.mark.parametrize("num_micro_batches", NUM_MICRO_BATCHES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_number_of_ranks_changes_rounding_alone(
    num_ranks: int, precision: str, num_micro_batches: int, runs: MatrixRuns
) -> None:
    """C67, C71, C73: a global batch, however split over ranks and micro-batches, trains alike within the tolerance."""
    cell = Cell(num_ranks, precision, 0, "none", "none", num_micro_batches, "vertical")  # type: ignore[arg-type]
    require_near(runs.of(cell), runs.of(REFERENCE)[0], TOLERANCES[cell.precision])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moment_of_reduction_changes_rounding_alone(num_ranks: int, runs: MatrixRuns) -> None:
    """C88: reducing each micro-batch sums in another order, and agrees with one reduction a step within the tolerance."""
    each = Cell(num_ranks, "fp32", 2, "nvme", "none", 4, "horizontal")
    once = Cell(num_ranks, "fp32", 2, "nvme", "none", 4, "horizontal", "boundary")
    assert (each.reduction, once.reduction) == ("micro_batch", "boundary")
    require_near(runs.of(each), runs.of(once)[0], TOLERANCES["fp32"])


def test_pruned_matrix_has_every_value() -> None:
    """The pairwise choice leaves out no stage, and every cell of the whole matrix that is its own oracle is legal."""
    assert {cell.stage for cell in PRUNED} == set(STAGES)
    assert all(cell.oracle.is_legal and cell.oracle.oracle == cell.oracle for cell in all_cells() + chosen_reductions())
