"""How many buffers units and tiles pass through: as many as are useful where there is room, as few as work where not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infinity.errors import DoesNotFit
from infinity.placement.plan import Plan
from infinity.placement.planner import make_plan
from infinity.placement.request import PlanRequest

_WEIGHT_SLOTS_WANTED = (3, 2)  # one unit runs, one is fetched, one is written; two do where memory is scarce


def plan_with_slots(
    request: PlanRequest, *, tile_slots: int | None = None, weight_slots: int | None = None, most_groups: int = 1
) -> Plan:
    """Return the plan with the most useful number of slots that fits; None leaves a number open.

    `most_groups`: parameter groups that one call holds at once. Raises as `make_plan`.
    """
    if tile_slots is not None:
        request = replace(request, min_tile_slots=min(tile_slots, request.min_tile_slots), max_tile_slots=tile_slots)
    counts = _WEIGHT_SLOTS_WANTED if weight_slots is None else (weight_slots,)
    return _first_that_fits([replace(request, num_weight_slots=max(count, most_groups)) for count in counts])


def _first_that_fits(requests: Sequence[PlanRequest]) -> Plan:
    for request in requests[:-1]:
        try:
            return make_plan(request)
        except DoesNotFit:
            continue
    return make_plan(requests[-1])
