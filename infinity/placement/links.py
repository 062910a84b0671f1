"""Bytes per step over the links beside NVMe: between the ranks, and between a rank's host memory and its GPU. Pure.

Between N ranks a gather or a reduction of E elements moves E (N - 1) / N of them to and from each rank. Weights that are
partitioned are gathered once in each direction; where only the optimizer is, its new weights are gathered once a step; where
nothing is, the reduced gradient is. Gradients are reduced in fp32, for they are rounded once, when they are final.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.placement.plan import Plan
from infinity.placement.request import FP32_BYTES, PlanRequest, Schedule
from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier


class Link(str, Enum):
    """What connects the places where bytes live."""

    RANKS = "between ranks"
    TO_GPU = "host to GPU"
    TO_HOST = "GPU to host"


@dataclass(frozen=True, slots=True)
class LinkLine:
    """Bytes of one rank over a link in one step; between ranks as many come in as go out."""

    link: Link
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveCounts:
    """How often in one step every weight is gathered, every gradient reduced, every reduced gradient gathered."""

    weight_gathers: int
    reductions: int
    gradient_gathers: int


def collective_counts(stage: int, *, num_micro_batches: int, schedule: Schedule) -> CollectiveCounts:
    """Return how often everything is gathered and reduced in one step.

    The sum is the theory's: 2 in stages 0 to 2, 3 in stage 3. In horizontal order what is partitioned moves for every
    micro-batch.
    """
    num_passes = num_micro_batches if schedule is Schedule.HORIZONTAL else 1
    splits_weights, splits_gradients, splits_optimizer = (
        is_partitioned(stage, kind) for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.OPTIM)
    )
    return CollectiveCounts(
        weight_gathers=2 * num_passes if splits_weights else int(splits_optimizer),
        reductions=num_passes if splits_gradients else 1,
        gradient_gathers=0 if splits_optimizer else 1,
    )


def collective_lines(request: PlanRequest, *, stage: int, num_ranks: int) -> tuple[LinkLine, ...]:
    """Return the bytes between ranks; none where there is one."""
    counts = collective_counts(stage, num_micro_batches=request.num_micro_batches, schedule=request.schedule)
    gathers_every_use = is_partitioned(stage, StateKind.PARAM)
    num_elements = sum(unit.num_gradient_elements for unit in request.units)
    weight_bytes = 0
    for unit in request.units:
        # Weights of no unit stay whole on every rank: only new ones are gathered.
        every_use = gathers_every_use and not unit.is_root
        num_gathers = counts.weight_gathers * unit.visits if every_use else min(counts.weight_gathers, 1)
        weight_bytes += num_gathers * unit.gathered_weight_bytes
    whole = (
        ("weights gathered", weight_bytes),
        ("gradients reduced", counts.reductions * num_elements * FP32_BYTES),
        ("gradients gathered", counts.gradient_gathers * num_elements * request.grad_element_bytes),
    )
    lines = (LinkLine(Link.RANKS, what, num_bytes * (num_ranks - 1) // num_ranks) for what, num_bytes in whole)
    return tuple(line for line in lines if line.num_bytes)


def host_lines(request: PlanRequest, plan: Plan) -> tuple[LinkLine, ...]:
    """Return the bytes between a rank's host memory and its GPU; none where the CPU computes."""
    if plan.compute_tier is not Tier.GPU:
        return ()
    num_passes = request.num_micro_batches if request.schedule is Schedule.HORIZONTAL else 1
    placed = tuple(zip(request.units, plan.units, strict=True))
    to_gpu = sum(_uploads(unit, where.params, num_passes) * unit.weight_bytes for unit, where in placed)
    sums = sum(request.sums_traffic_bytes(unit) for unit in request.units)
    finished = sum(request.finished_bytes(unit) for unit in request.units)
    lines = (
        LinkLine(Link.TO_GPU, "weights", to_gpu),
        LinkLine(Link.TO_GPU, "gradient sums", sums),
        LinkLine(Link.TO_HOST, "gradients", finished + sums),
    )
    return tuple(line for line in lines if line.num_bytes)


def _uploads(unit: UnitSize, params: Tier, num_passes: int) -> int:
    """Return how often a unit's weights go to the GPU: once when they are new, or for every use."""
    if params is Tier.GPU:
        return 1 if unit.num_waiting_elements else 0
    return 2 * num_passes * unit.visits
