"""The one table of ZeRO stages: which model states are partitioned over ranks (Rajbhandari et al., 2020)."""

from __future__ import annotations

from infinity.states import StateKind

PARTITIONED: dict[int, frozenset[StateKind]] = {
    0: frozenset(),
    1: frozenset({StateKind.OPTIM}),
    2: frozenset({StateKind.OPTIM, StateKind.GRAD}),
    3: frozenset({StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM}),
}


def is_partitioned(stage: int, kind: StateKind) -> bool:
    """Return whether each rank holds only its part of `kind`."""
    return kind in PARTITIONED[stage]
