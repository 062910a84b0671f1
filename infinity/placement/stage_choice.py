"""Which ZeRO stage to take: the one that offloads least, and of equals the lowest; and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from infinity.byte_sizes import format_bytes
from infinity.errors import ConfigError, DoesNotFit
from infinity.placement.plan import Plan
from infinity.placement.stages import PARTITIONED


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The stage, and a sentence that says why."""

    stage: int
    reason: str


def choose_stage(plans: Mapping[int, Plan], refused: Collection[int] = ()) -> StageChoice | None:
    """Choose among the plans of the stages that fit; None where there is none. `refused` are the stages that have no plan.

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
    unfit = ", ".join(str(number) for number in sorted(refused) if number < best)
    first = f"It is the lowest that fits (not {unfit}), and no" if unfit else "No"
    return StageChoice(best, f"{first} higher stage offloads less: {_words(plans[best])}.")


def plan_best_stage(plan_at: Callable[[int], Plan]) -> Plan:
    """Return the plan of the stage that `choose_stage` takes, which says why; `plan_at` makes the plan of a stage or raises.

    Raises what the last stage did, which takes the least memory, where none has a plan: ConfigError or DoesNotFit.
    """
    plans: dict[int, Plan] = {}
    refused: dict[int, ConfigError | DoesNotFit] = {}
    for stage in PARTITIONED:
        try:
            plans[stage] = plan_at(stage)
        except (ConfigError, DoesNotFit) as error:
            refused[stage] = error
    choice = choose_stage(plans, refused)
    if choice is None:
        raise refused[max(refused)]
    return replace(plans[choice.stage], stage_reason=choice.reason)


def _offloads(plan: Plan) -> tuple[int, int]:
    return plan.nvme_read_bytes + plan.nvme_write_bytes, sum(unit.params is not plan.compute_tier for unit in plan.units)


def _words(plan: Plan) -> str:
    moved, num_away = _offloads(plan)
    words = f"{format_bytes(moved)} over NVMe a step" if moved else "nothing on NVMe"
    return f"{words}, weights of {num_away} of {len(plan.units)} units away from the compute tier" if num_away else words
