"""The whole matrix over 20 steps, and the table of its results: docs/matrix.md where MATRIX_TABLE names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from agreement import REFERENCE, TOLERANCES, MatrixRuns, require_near, require_same_bits
from matrix_cells import NUM_RANKS, PRECISIONS, STAGES, all_cells, chosen_reductions
from matrix_table import MatrixTable
from rank_pool import RankPool

NUM_STEPS = 20


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> MatrixRuns:
    """Runs of this module; their directory for swap files is one."""
    return MatrixRuns(ranks, str(tmp_path_factory.mktemp("nvme")), NUM_STEPS)


@pytest.fixture(scope="module")
def table() -> Iterator[MatrixTable]:
    """What is found, written when the whole matrix has run."""
    found = MatrixTable(NUM_STEPS)
    yield found
    if "MATRIX_TABLE" in os.environ:
        Path(os.environ["MATRIX_TABLE"]).write_text(found.text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_ranks", "precision", "stage"), product(NUM_RANKS, PRECISIONS, STAGES))
def test_whole_matrix(num_ranks: int, precision: str, stage: int, runs: MatrixRuns, table: MatrixTable) -> None:
    """C67, C71, C72, C73, C88, C89: every cell has the bits of its oracle, which is near one rank in fp32."""
    of_this_test = (num_ranks, precision, stage)
    reference = runs.of(REFERENCE)[0]
    for cell in all_cells() + chosen_reductions():
        if (cell.num_ranks, cell.precision, cell.stage) == of_this_test:
            made, oracle = runs.of(cell), runs.of(cell.oracle)
            table.add(cell, made, oracle, reference)
            require_near(made, reference, TOLERANCES[cell.precision])
            require_same_bits(made, oracle)
            runs.forget()
