"""Bytes per step over the links beside NVMe: between the ranks, and between a rank's host memory and its GPU. Pure.

Between N ranks a gather or a reduction of E elements moves E (N - 1) / N of them to and from each rank. Weights that are
partitioned are gathered once in each direction; where only the optimizer is, its new weights are gathered once a step; where
nothing is, the reduced gradient is. Gradients are reduced in fp32, for they are rounded once, when they are final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.placement.draft import Draft
from infinity.placement.estimate import first_in_slots, last_in_slots
from infinity.placement.plan import Link, LinkLine
from infinity.placement.request import GradientReduction, PlanRequest, Schedule
from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier


@dataclass(frozen=True, slots=True)
class CollectiveCounts:
    """How often in one step every weight is gathered, every gradient reduced, every reduced gradient gathered."""

    weight_gathers: int
    reductions: int
    gradient_gathers: int


def collective_counts(request: PlanRequest) -> CollectiveCounts:
    """Return how often everything is gathered and reduced in one step.

    The sum is the theory's: 2 in stages 0 to 2, 3 in stage 3. In horizontal order weights that are partitioned move for
    every micro-batch, and so do gradients that are reduced in each.
    """
    num_passes = request.num_micro_batches if request.schedule is Schedule.HORIZONTAL else 1
    splits_weights, splits_optimizer = (is_partitioned(request.stage, kind) for kind in (StateKind.PARAM, StateKind.OPTIM))
    return CollectiveCounts(
        weight_gathers=2 * num_passes if splits_weights else int(splits_optimizer),
        reductions=num_passes if request.reduction is GradientReduction.MICRO_BATCH else 1,
        gradient_gathers=0 if splits_optimizer else 1,
    )


def collective_lines(request: PlanRequest) -> tuple[LinkLine, ...]:
    """Return the bytes between ranks; none where there is one."""
    counts = collective_counts(request)
    num_elements = sum(unit.num_gradient_elements for unit in request.units)

    def others(num_bytes: int) -> int:
        return num_bytes * (request.num_ranks - 1) // request.num_ranks

    lines = (
        LinkLine(
            Link.RANKS,
            "weights gathered",
            others(sum(_gathered_bytes(unit, counts.weight_gathers) for unit in request.units)),
            others(_bytes_in_slots(request)),
        ),
        LinkLine(
            Link.RANKS,
            "gradients reduced",
            others(counts.reductions * num_elements * request.reduced_element_bytes),
        ),
        LinkLine(
            Link.RANKS, "gradients gathered", others(counts.gradient_gathers * num_elements * request.grad_element_bytes)
        ),
    )
    return tuple(line for line in lines if line.num_bytes)


def _gathered_bytes(unit: UnitSize, num_gathers: int) -> int:
    """Return what gathers of a unit's weights come to: for every use, or once after an update has changed them."""
    if unit.gathers_weights:
        return num_gathers * unit.visits * unit.gather_bytes
    return unit.gather_bytes if unit.is_split and unit.num_gradient_elements else 0


def _bytes_in_slots(request: PlanRequest) -> int:
    """Return what is not gathered again because it is in a slot when the order of work turns.

    At the turn from forward into backward, and from that into the forward of the next micro-batch: after the last one the
    weights are new.
    """
    gathered = [unit for unit in request.units if unit.gathers_weights]
    last, first = (find(gathered, request.num_weight_slots) for find in (last_in_slots, first_in_slots))
    num_passes = request.num_micro_batches if request.schedule is Schedule.HORIZONTAL else 1
    return num_passes * sum(unit.gather_bytes for unit in last) + (num_passes - 1) * sum(unit.gather_bytes for unit in first)


def host_lines(request: PlanRequest, drafts: Sequence[Draft]) -> tuple[LinkLine, ...]:
    """Return the bytes between a rank's host memory and its GPU; none where the CPU computes."""
    if request.compute_tier is not Tier.GPU:
        return ()
    num_passes = request.num_micro_batches if request.schedule is Schedule.HORIZONTAL else 1
    to_gpu = sum(_uploads(draft, num_passes) * draft.unit.weight_bytes for draft in drafts)
    sums = sum(request.sums_traffic_bytes(unit) for unit in request.units)
    finished = sum(request.finished_bytes(unit) for unit in request.units)
    lines = (
        LinkLine(Link.TO_GPU, "weights", to_gpu),
        LinkLine(Link.TO_GPU, "gradient sums", sums),
        LinkLine(Link.TO_HOST, "gradients", finished + sums),
    )
    return tuple(line for line in lines if line.num_bytes)


def _uploads(draft: Draft, num_passes: int) -> int:
    """Return how often a unit's weights go to the GPU: once when they are new, or for every use."""
    if draft.params is Tier.GPU:
        return 1 if draft.unit.num_waiting_elements else 0
    return 2 * num_passes * draft.unit.visits
