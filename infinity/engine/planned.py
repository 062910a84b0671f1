"""From what the user asked for to a plan, and from the plan to what the rooms below want to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity.config import Config
from infinity.engine.cut import DTYPE_NAMES, CutModel
from infinity.memory.device import ComputeDevice
from infinity.memory.limits import HEADROOM_SHARE, plannable_host_bytes
from infinity.placement import Placement, Plan, PlanRequest, Schedule, UnitPlan, plan_with_slots
from infinity.placement.placement import AUTO, ShareChoice
from infinity.states import Tier
from infinity.store.layout import ELEMENT_BYTES
from infinity.store.shares import ShardShares
from infinity.zero.shard import Residency

# Of the budget, what is kept for activations where nobody says how many there are; measured from the first step on.
_ACTIVATION_SHARE = 0.2


def grad_dtype_of(config: Config) -> str:
    """Return torch's name of the dtype to which finished gradients are rounded."""
    return DTYPE_NAMES[config.grad_dtype]


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """What is known of the memory that torch will need inside units."""

    num_bytes: int | None = None  # inputs of units and one unit's working set; None: a share of the budget
    kept_bytes: Callable[[str], int] | None = None  # by unit name: of one micro-batch where the unit is not rerun


def plan_for(
    pieces: CutModel,
    config: Config,
    placement: Placement,
    compute: ComputeDevice,
    activations: ActivationSizes,
    recorded_cpu_bytes: int | None = None,
) -> Plan:
    """Return the plan for a cut model. Raises DoesNotFit.

    Without a budget of the configuration, `recorded_cpu_bytes` counts: that of the run whose swap files are taken over.
    """
    own = config.infinity
    cpu_bytes = own.cpu_memory or recorded_cpu_bytes or plannable_host_bytes()
    gpu_bytes = None
    if compute.memory is not None:
        gpu_bytes = own.gpu_memory or int(compute.memory.free_bytes() * (1 - HEADROOM_SHARE))
    compute_bytes = cpu_bytes if gpu_bytes is None else gpu_bytes
    request = PlanRequest(
        units=pieces.sizes(activations.kept_bytes),
        placement=placement,
        cpu_memory_bytes=cpu_bytes,
        gpu_memory_bytes=gpu_bytes,
        num_micro_batches=config.batch(1).num_micro_batches,
        activation_bytes=int(compute_bytes * _ACTIVATION_SHARE) if activations.num_bytes is None else activations.num_bytes,
        grad_element_bytes=ELEMENT_BYTES[grad_dtype_of(config)],
        tile_elements=pieces.tile_elements,
        schedule=Schedule(own.schedule),
        recompute=own.recompute,
        root_bytes=pieces.buffer_bytes(),
        has_nvme=bool(config.nvme_directories),
    )
    most_groups = max((len(unit.groups) for unit in pieces.units), default=1)  # a call holds all of its unit's at once
    return plan_with_slots(request, tile_slots=own.tile_slots, weight_slots=own.weight_slots, most_groups=most_groups)


def placement_notes(placement: Placement, pieces: CutModel, compute: ComputeDevice) -> tuple[str, ...]:
    """Return what was asked for and is done differently, in sentences."""
    asked = placement.resolve(pieces.sizes())
    if compute.tier is not Tier.GPU or not any(unit.grads is Tier.GPU or _names_gpu(unit.optim) for unit in asked):
        return ()
    return ("Gradients and optimizer state that were asked onto the GPU stay in RAM: the CPU updates them.",)


def _names_gpu(optim: ShareChoice) -> bool:
    return optim != AUTO and any(tier is Tier.GPU for tier, _ in optim)


def shares_of(unit: UnitPlan) -> ShardShares:
    """Return what the store needs to know of a unit's plan."""
    return ShardShares(unit.params, unit.grads, unit.resident_tiles, unit.num_sums)


def residencies_of(pieces: CutModel, plan: Plan) -> dict[int, Residency]:
    """Weights on the compute tier stay; they may be read at any time where nothing of their update is left for later."""
    found = {}
    for group, layout, unit in zip(pieces.groups, pieces.layouts, plan.units, strict=True):
        all_resident = unit.num_nvme_tiles == 0 and unit.grads is not Tier.NVME
        found[layout.index] = Residency.RESIDENT if all_resident or not group.units else Residency.KEPT
        if group.units and unit.params is not plan.compute_tier:
            found[layout.index] = Residency.ABSENT
    return found
