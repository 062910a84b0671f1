"""When two runs over ranks agree: to the bit where sums have one order, within a stated tolerance everywhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matrix_cells import Cell, Precision
from rank_pool import RankPool
from rank_training import RankRun, asked_of, train


@dataclass(frozen=True)
class Tolerance:
    """The most by which a run of 20 steps may be off the reference: one rank, one micro-batch, fp32, all in RAM."""

    loss: float  # of every step, relative
    grad_norm: float  # of every step, relative
    weight: float  # of every element of every weight, absolute; weights are about 1, lr is 1e-3


# fp32 differs in the order of sums alone; the others have rounded weights, activations and gradients.
TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(loss=1e-6, grad_norm=1e-6, weight=2e-6),
    "bf16": Tolerance(loss=1e-2, grad_norm=2e-2, weight=5e-3),
    "fp16": Tolerance(loss=1e-3, grad_norm=2e-3, weight=1e-3),
}
REFERENCE = Cell(1, "fp32", 0, "none", "none", 1, "vertical")


class MatrixRuns:
    """Runs of cells, each made once. They share one directory for swap files."""

    def __init__(self, ranks: RankPool, nvme: str, num_steps: int) -> None:
        self._ranks = ranks
        self._nvme = nvme
        self._num_steps = num_steps
        self._made: dict[Cell, list[RankRun]] = {}

    def of(self, cell: Cell) -> list[RankRun]:
        """Return what each rank has seen."""
        if cell not in self._made:
            asked = asked_of(cell, self._nvme, self._num_steps)
            self._made[cell] = self._ranks.run(cell.num_ranks, train, asked=asked, seconds=120)
        return self._made[cell]

    def forget(self) -> None:
        """Keep the reference and the oracles alone."""
        kept = {cell.oracle for cell in self._made} | {REFERENCE}
        self._made = {cell: runs for cell, runs in self._made.items() if cell in kept}


def require_same_bits(runs: Sequence[RankRun], oracle: Sequence[RankRun]) -> None:
    """Fail unless every rank has the losses that it has in `oracle`, and all have its weights and buffers, bit for bit."""
    for run, reference in zip(runs, oracle, strict=True):
        assert run.losses == reference.losses
        assert all(math.isfinite(loss) for losses in run.losses for loss in losses)
        assert [result.grad_norm for result in run.results] == [result.grad_norm for result in reference.results]
    different = [name for name, value in oracle[0].state.items() if not value.equal(runs[0].state[name])]
    assert different == []
    assert {run.digest for run in runs} == {run.digest for run in oracle}
    assert len({run.digest for run in runs}) == 1, "ranks have different weights"


def require_near(runs: Sequence[RankRun], reference: RankRun, tolerance: Tolerance) -> None:
    """Fail unless losses, gradient norms and weights are those of `reference` within the tolerance, element by element."""
    for run in runs:
        for ours, theirs in zip(run.results, reference.results, strict=True):
            assert not ours.skipped
            assert math.isclose(ours.loss, theirs.loss, rel_tol=tolerance.loss)
            assert math.isclose(ours.grad_norm, theirs.grad_norm, rel_tol=tolerance.grad_norm)
    far = {
        name: distance
        for name, value in reference.state.items()
        if (distance := float((runs[0].state[name].float() - value.float()).abs().max())) > tolerance.weight
    }
    assert far == {}
