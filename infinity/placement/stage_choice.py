"""Which ZeRO stage to take: the one that offloads least, and of equals the lowest; and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.byte_sizes import format_bytes
from infinity.placement.plan import Plan


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The stage, and a sentence that says why."""

    stage: int
    reason: str


def choose_stage(plans: Mapping[int, Plan]) -> StageChoice | None:
    """Choose among the plans of the stages that fit; None where there is none.

    Fewest NVMe bytes a step first, then fewest units whose weights leave the compute tier, then the lowest stage, which has
    the least to do with other ranks.
    """
    if not plans:
        return None
    best = min(plans, key=lambda number: (*_offloads(plans[number]), number))
    lower = [number for number in plans if number < best]
    if lower:
        nearest = max(lower)
        return StageChoice(
            best, f"Of those that fit it offloads least: {_words(plans[best])}; stage {nearest}: {_words(plans[nearest])}."
        )
    if len(plans) == 1:
        return StageChoice(best, f"It is the one that fits: {_words(plans[best])}.")
    return StageChoice(best, f"No higher stage offloads less: {_words(plans[best])}.")


def _offloads(plan: Plan) -> tuple[int, int]:
    return plan.nvme_read_bytes + plan.nvme_write_bytes, sum(unit.params is not plan.compute_tier for unit in plan.units)


def _words(plan: Plan) -> str:
    moved, num_away = _offloads(plan)
    words = f"{format_bytes(moved)} over NVMe a step" if moved else "nothing on NVMe"
    return f"{words}, weights of {num_away} of {len(plan.units)} units away from the compute tier" if num_away else words
