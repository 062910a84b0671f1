"""Makes the plan: decided tiers first, then what fits where, else an error that says what would fit."""

from __future__ import annotations

from dataclasses import replace

from infinity.placement.contradictions import require_consistent
from infinity.placement.draft import Draft
from infinity.placement.estimate import (
    disk_lines,
    gradient_slots,
    host_weight_slots,
    memory_lines,
    reduction_bytes,
    tile_gradient_bytes,
    tile_slot_bytes,
    traffic_lines,
    weight_slots,
)
from infinity.placement.explain import cpu_does_not_fit, gpu_does_not_fit
from infinity.placement.links import collective_lines, host_lines
from infinity.placement.plan import Plan, UnitPlan
from infinity.placement.request import PlanRequest
from infinity.placement.search import Candidate, candidates, decided, fits_gpu, free_tiles
from infinity.states import Tier


def make_plan(request: PlanRequest) -> Plan:
    """Return where every state lives. Raises ConfigError for a placement that contradicts itself or names no unit, and
    DoesNotFit, with what is needed, what there is and what would do, where no plan keeps to the budgets."""
    drafts = decided(request)
    require_consistent(request, drafts)
    if not fits_gpu(request, drafts):
        raise gpu_does_not_fit(request)
    fitting = list(candidates(request, drafts, request.cpu_memory_bytes))
    if not fitting:
        raise cpu_does_not_fit(request)
    best = min(fitting, key=lambda candidate: (candidate.traffic_bytes, -candidate.num_tile_slots, candidate.cpu_bytes))
    return _plan(request, _assigned(best), best.num_tile_slots)


def _assigned(best: Candidate) -> tuple[Draft, ...]:
    """Give the candidate's resident tiles to its units, and what is still undecided to NVMe."""
    resident: dict[int, list[int]] = {}
    for number, tile in free_tiles(best.drafts)[: best.num_tiles]:
        resident.setdefault(number, []).append(tile)
    return tuple(
        replace(
            draft.with_tiles(tuple(resident[number])) if number in resident else draft,
            params=draft.params or Tier.NVME,
            grads=draft.grads or Tier.NVME,
            has_free_tiles=False,
        )
        for number, draft in enumerate(best.drafts)
    )


def _plan(request: PlanRequest, drafts: tuple[Draft, ...], num_tile_slots: int) -> Plan:
    num_slots, slot_bytes = weight_slots(request, drafts)
    num_host_slots, host_slot_bytes = host_weight_slots(request, drafts)
    num_gradient_slots, gradient_bytes = gradient_slots(request, drafts)
    streams_tiles = any(draft.has_nvme_tiles for draft in drafts)
    budgets = [(Tier.CPU, request.cpu_memory_bytes)]
    if request.gpu_memory_bytes is not None:
        budgets.insert(0, (Tier.GPU, request.gpu_memory_bytes))
    return Plan(
        units=tuple(_unit_plan(request, draft) for draft in drafts),
        compute_tier=request.compute_tier,
        stage=request.stage,
        num_ranks=request.num_ranks,
        gradient_reduction=request.reduction.value,
        reduction_bytes=reduction_bytes(request),
        num_weight_slots=num_slots,
        weight_slot_bytes=slot_bytes,
        num_host_weight_slots=num_host_slots,
        host_weight_slot_bytes=host_slot_bytes,
        num_tile_slots=num_tile_slots if streams_tiles else 0,
        tile_slot_bytes=tile_slot_bytes(drafts) if streams_tiles else 0,
        num_gradient_slots=num_gradient_slots,
        gradient_slot_bytes=gradient_bytes,
        tile_gradient_bytes=tile_gradient_bytes(request) if gradient_bytes else 0,
        memory=memory_lines(request, drafts, num_tile_slots=num_tile_slots),
        traffic=traffic_lines(request, drafts),
        links=(*collective_lines(request), *host_lines(request, drafts)),
        disk=disk_lines(drafts),
        budgets=tuple(budgets),
    )


def _unit_plan(request: PlanRequest, draft: Draft) -> UnitPlan:
    params, grads = draft.params or Tier.NVME, draft.grads or Tier.NVME
    return UnitPlan(
        name=draft.unit.name,
        params=params,
        grads=grads,
        num_sums=request.num_sums(draft.unit),
        num_sum_elements=request.num_sum_elements(draft.unit),
        num_tiles=draft.unit.num_tiles,
        cpu_tiles=draft.cpu_tiles,
        reruns=not draft.unit.is_root and (request.recompute or not draft.stays_on(request.compute_tier)),
    )
