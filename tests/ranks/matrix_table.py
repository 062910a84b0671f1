"""The result table of the whole matrix, as a page in Markdown."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from agreement import TOLERANCES
from matrix_cells import TIERS, Cell
from rank_training import RankRun

import infinity

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "MATRIX_TABLE=docs/matrix.md python -m pytest -n0 tests/ranks/test_whole_matrix.py"
NAMES = {"none": "compute", "cpu": "cpu", "nvme": "nvme"}
SAME, DIFFERENT, NO_RUN = "=", "DIFFERENT", ""


class MatrixTable:
    """Cells as they come in; rows are what decides the order of sums, columns are tiers."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
        self._distances: dict[tuple[str, ...], float] = {}
        self._digests: dict[tuple[str, ...], str] = {}

    def add(self, cell: Cell, runs: Sequence[RankRun], oracle: Sequence[RankRun], reference: RankRun) -> None:
        """Enter what a cell has given."""
        row = (
            str(cell.num_ranks), cell.precision, str(cell.num_micro_batches), cell.reduction, str(cell.stage), cell.schedule
        )  # fmt: skip
        same = all(
            run.digest == theirs.digest and run.losses == theirs.losses for run, theirs in zip(runs, oracle, strict=True)
        )
        self._rows.setdefault(row, {})[cell.optim, cell.params] = SAME if same else DIFFERENT
        self._digests[row] = oracle[0].digest[:8]
        distance = max(
            abs(ours.loss - theirs.loss) / abs(theirs.loss)
            for ours, theirs in zip(runs[0].results, reference.results, strict=True)
        )
        self._distances[row] = max(distance, self._distances.get(row, 0.0))

    def text(self) -> str:
        """Return the page."""
        tiers = [(optim, params) for optim in TIERS for params in TIERS]
        heads = [f"{NAMES[optim]} / {NAMES[params]}" for optim, params in tiers]
        header = ["ranks", "precision", "A", "reduction", "stage", "schedule", *heads, "oracle", "loss"]
        lines = [
            [*row, *(found.get(tier, NO_RUN) for tier in tiers), f"`{self._digests[row]}`", f"{self._distances[row]:.1e}"]
            for row, found in sorted(self._rows.items())
        ]
        marks = [mark for found in self._rows.values() for mark in found.values()]
        return "\n".join(
            [
                "# The matrix",
                "",
                "Tiny-gpt on one global batch of 24 sequences, split over ranks and A micro-batches, trained for "
                f"{self._num_steps} steps.",
                "A column is optimizer tier / parameter tier; the CPU plays the compute tier. `=`: losses and weights have",
                "the bits of the oracle, which is stage 0 with everything in RAM and the same ranks, precision, A and",
                "moments of reduction; beside it stands the digest of its weights. An empty place is not legal: over",
                "several ranks, weights off the compute tier need stage 3. Last, the largest relative distance of a step's",
                "loss from one rank in fp32.",
                "",
                f"{len(marks)} cells, {marks.count(DIFFERENT)} different. Within the tolerances: "
                + "; ".join(
                    f"{precision}: loss {limits.loss:g}, gradient norm {limits.grad_norm:g} (relative), "
                    f"weights {limits.weight:g} (absolute)"
                    for precision, limits in TOLERANCES.items()
                )
                + ".",
                "",
                f"Written by `{COMMAND}` at {_commit()}; infinity {infinity.__version__}, torch {torch.__version__}, Python "
                f"{platform.python_version()}, {platform.machine()}, gloo.",
                "",
                *("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)),
                "",
            ]
        )


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(asked, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip() or "unknown"
