"""Overlap of collectives and computation, by the order of events: gathers ahead of need, reductions beside backward."""

from __future__ import annotations

import re

from overlap_errand import train_slowly
from rank_pool import RankPool
from slow_units import NUM_UNITS


def test_gathers_come_before_they_are_needed_and_reductions_run_beside_the_next_unit(ranks: RankPool) -> None:
    """Stage 3: unit u+1 has its weights before unit u has run; its gradient is summed before unit u has been rerun."""
    outcomes = ranks.run(2, train_slowly)
    for outcome in outcomes:
        runs, moved = outcome["runs"], outcome["moved"]
        forward = {number: (begin, end) for number, begin, end in runs[:NUM_UNITS]}
        backward = {number: (begin, end) for number, begin, end in runs[NUM_UNITS:]}
        assert sorted(forward) == list(range(NUM_UNITS))
        gathered = {number: [] for number in range(NUM_UNITS)}
        reduced = {}
        for what, begin, end in moved:
            unit = re.search(r"blocks\.(\d+)", what)
            if unit and "weights" in what:
                gathered[int(unit[1])].append((begin, end))
            if unit and "gradient" in what:
                reduced[int(unit[1])] = (begin, end)
        early = sum(gathered[number + 1][0][1] < forward[number][1] for number in range(NUM_UNITS - 1))
        assert early >= NUM_UNITS - 2  # all but one, on a machine that does other things
        beside = sum(reduced[number + 1][1] < backward[number][1] for number in backward if number + 1 in reduced)
        assert beside >= len(backward) - 1
