"""The matrix: all combinations of stage, tiers, accumulation, ranks, precision, schedule; and which share their bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, product
from typing import Literal

Tier = Literal["none", "cpu", "nvme"]  # none: on the compute tier
Precision = Literal["fp32", "bf16", "fp16"]
Order = Literal["vertical", "horizontal"]
Reduction = Literal["boundary", "micro_batch"]

STAGES = (0, 1, 2, 3)
TIERS: tuple[Tier, ...] = ("none", "cpu", "nvme")
NUM_MICRO_BATCHES = (1, 4)
NUM_RANKS = (1, 2, 3)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
ORDERS: tuple[Order, ...] = ("vertical", "horizontal")


@dataclass(frozen=True)
class Cell:
    """One combination."""

    num_ranks: int
    precision: Precision
    stage: int
    optim: Tier
    params: Tier
    num_micro_batches: int
    schedule: Order
    gradient_reduction: Reduction | None = None  # None: the default of stage and schedule

    @property
    def reduction(self) -> Reduction:
        """When gradients are reduced over ranks."""
        by_default: Reduction = "micro_batch" if self.schedule == "horizontal" and self.stage >= 2 else "boundary"
        return self.gradient_reduction or by_default

    @property
    def oracle(self) -> Cell:
        """The cell whose bits this one must have: stage 0, all in RAM, and with one reduction a step in vertical order.

        The order of sums is that of ranks, precision and accumulation; with one micro-batch both reductions are the same,
        and with one rank there is none.
        """
        whole = replace(self, stage=0, optim="none", params="none", schedule="vertical", gradient_reduction=None)
        if self.reduction == "boundary" or self.num_micro_batches == 1 or self.num_ranks == 1:
            return whole
        return replace(whole, schedule="horizontal", gradient_reduction="micro_batch")

    @property
    def is_legal(self) -> bool:
        """Over several ranks weights off the compute tier need stage 3."""
        return self.num_ranks == 1 or self.stage == 3 or self.params != "nvme"

    def __str__(self) -> str:
        return (
            f"{self.num_ranks}-{self.precision}-stage{self.stage}-{self.optim}-{self.params}-A{self.num_micro_batches}-"
            f"{self.schedule}-{self.reduction}"
        )


def all_cells() -> tuple[Cell, ...]:
    """Return every legal combination with the reduction that it has by default."""
    asked = product(NUM_RANKS, PRECISIONS, STAGES, TIERS, TIERS, NUM_MICRO_BATCHES, ORDERS)
    return tuple(cell for cell in (Cell(*values) for values in asked) if cell.is_legal)


def chosen_reductions() -> tuple[Cell, ...]:
    """Return the cells that ask for the reduction that they do not have by default: in horizontal order both are legal."""
    found = []
    for ranks, precision, stage in product((2, 3), PRECISIONS, STAGES):
        other: Reduction = "boundary" if stage >= 2 else "micro_batch"
        found.append(Cell(ranks, precision, stage, "nvme", "none", 4, "horizontal", other))
    return tuple(found)


def pairwise(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return few cells in which every two values that occur together in `cells` do so at least once; always the same ones.

    Greedy: each time the cell that brings the most pairs that are still missing, the first of several.
    """
    pairs = {cell: frozenset(_pairs(cell)) for cell in cells}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return tuple(chosen)


def _pairs(cell: Cell) -> Iterable[tuple[tuple[str, object], tuple[str, object]]]:
    values = [(field.name, asdict(cell)[field.name]) for field in fields(cell)]
    return combinations(values, 2)
