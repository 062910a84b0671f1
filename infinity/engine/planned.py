"""From what the user asked for to a plan, and from the plan to what the rooms below want to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from infinity.comm.buckets import scratch_bytes
from infinity.comm.launched import ONE_RANK, Ranks
from infinity.config import Config
from infinity.engine.cut import DTYPE_NAMES, CutModel
from infinity.errors import ConfigError
from infinity.memory.device import ComputeDevice
from infinity.memory.limits import HEADROOM_SHARE, plannable_host_bytes
from infinity.placement import (
    GradientReduction,
    Placement,
    Plan,
    PlanRequest,
    Schedule,
    UnitPlan,
    plan_best_stage,
    plan_with_slots,
)
from infinity.placement.placement import AUTO, ShareChoice
from infinity.placement.stages import PARTITIONED
from infinity.states import Tier
from infinity.store.layout import ELEMENT_BYTES, ShardLayout
from infinity.store.shares import ShardShares
from infinity.zero.shard import Residency

# Of the budget, what is kept for activations where nobody says how many there are; measured from the first step on.
_ACTIVATION_SHARE = 0.2


def grad_dtype_of(config: Config) -> str:
    """Return torch's name of the dtype to which finished gradients are rounded."""
    return DTYPE_NAMES[config.grad_dtype]


def asked_reduction(config: Config) -> GradientReduction | None:
    """Return when gradients are to be summed over ranks; None where the stage decides."""
    asked = config.infinity.gradient_reduction
    return None if asked is None else GradientReduction(asked)


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
    ranks: Ranks = ONE_RANK,
    recorded_cpu_bytes: int | None = None,
    agree: Callable[[int], int] = int,
) -> Plan:
    """Return this rank's plan for a model that is cut for the placement's stage. Raises DoesNotFit and ConfigError.

    RAM is the machine's and shared by its ranks. Without a budget of the configuration, `recorded_cpu_bytes` counts: that of
    this rank in the run whose swap files are taken over. `agree` makes a number of bytes that was measured on this rank one
    that all ranks have, so that they plan alike.
    """
    if pieces.torch_values is not None:
        _require_in_memory(placement, pieces)
    own, num_local = config.infinity, ranks.local_world_size
    cpu_bytes = own.cpu_memory // num_local if own.cpu_memory else recorded_cpu_bytes or plannable_host_bytes() // num_local
    cpu_bytes, gpu_bytes = agree(cpu_bytes), None
    if compute.memory is not None:
        gpu_bytes = agree(own.gpu_memory or int(compute.memory.free_bytes() * (1 - HEADROOM_SHARE)))
    compute_bytes = cpu_bytes if gpu_bytes is None else gpu_bytes
    request = PlanRequest(
        units=pieces.sizes(activations.kept_bytes),
        placement=placement,
        cpu_memory_bytes=cpu_bytes,
        gpu_memory_bytes=gpu_bytes,
        num_micro_batches=config.batch(ranks.world_size).num_micro_batches,
        activation_bytes=int(compute_bytes * _ACTIVATION_SHARE) if activations.num_bytes is None else activations.num_bytes,
        grad_element_bytes=ELEMENT_BYTES[grad_dtype_of(config)],
        tile_elements=pieces.tile_elements,
        schedule=Schedule(own.schedule),
        recompute=own.recompute,
        root_bytes=pieces.buffer_bytes(),
        has_nvme=bool(config.nvme_directories) and pieces.torch_values is None,
        torch_values=pieces.torch_values,
        num_local_ranks=num_local,
        num_ranks=ranks.world_size,
        gradient_reduction=asked_reduction(config),
        reduced_element_bytes=ELEMENT_BYTES[DTYPE_NAMES[config.communication_data_type]],
        scratch_bytes=scratch_bytes(ranks.world_size) if gpu_bytes is None else 0,
    )
    most_groups = max((len(unit.groups) for unit in pieces.units), default=1)  # a call holds all of its unit's at once
    return plan_with_slots(request, tile_slots=own.tile_slots, weight_slots=own.weight_slots, most_groups=most_groups)


def cut_and_plan(
    cut_at: Callable[[int], CutModel],
    config: Config,
    placement: Placement,
    compute: ComputeDevice,
    activations: ActivationSizes,
    ranks: Ranks,
    recorded_cpu_bytes: int | None = None,
    agree: Callable[[int], int] = int,
) -> tuple[CutModel, Plan]:
    """Return the model as it is cut for a stage, and the plan: the stage that is asked for, or the best one.

    Raises as `plan_for` and as `cut_at`, which cuts the model for a stage.
    """
    cuts: dict[int, CutModel] = {}

    def plan_at(stage: int) -> Plan:
        cuts[stage] = cut_at(stage)
        asked = replace(placement, stage=stage)
        return plan_for(cuts[stage], config, asked, compute, activations, ranks, recorded_cpu_bytes, agree)

    given = [one for one in (placement.stage, config.zero_optimization.stage) if one is not None]
    if not given and ranks.world_size == 1:  # all stages are one
        given = [min(PARTITIONED)]
    plan = plan_at(given[0]) if given else plan_best_stage(plan_at)
    return cuts[plan.stage], plan


def _require_in_memory(placement: Placement, pieces: CutModel) -> None:
    for layout, unit in zip(pieces.layouts, placement.resolve(pieces.sizes()), strict=True):
        optim = () if unit.optim == AUTO else tuple(tier for tier, _ in unit.optim)
        for state, tiers in (("optim", optim), ("params", (unit.params,)), ("grads", (unit.grads,))):
            if Tier.NVME in tiers:
                raise ConfigError(
                    f"{state} of {layout.name} is asked onto NVMe, but the optimizer is torch's own: it needs weights, "
                    "gradients and state in memory.",
                    remedy="Use Adam or AdamW, which work on every tier, or leave the state in memory.",
                )


def placement_notes(placement: Placement, pieces: CutModel, compute: ComputeDevice) -> tuple[str, ...]:
    """Return what was asked for and is done differently, in sentences."""
    if compute.tier is not Tier.GPU:
        return ()
    sizes = pieces.sizes()
    asked, notes = placement.resolve(sizes), []
    if any(unit.grads is Tier.GPU or _names_gpu(unit.optim) for unit in asked):
        notes.append("Gradients and optimizer state that were asked onto the GPU stay in RAM: the CPU updates them.")
    if any(size.gathers_weights and unit.params is Tier.GPU for size, unit in zip(sizes, asked, strict=True)):
        notes.append("Parts of weights that were asked onto the GPU stay in RAM, and go there for every use.")
    return tuple(notes)


def _names_gpu(optim: ShareChoice) -> bool:
    return optim != AUTO and any(tier is Tier.GPU for tier, _ in optim)


def shares_of(unit: UnitPlan, layout: ShardLayout) -> ShardShares:
    """Return what the store needs to know of a unit's plan; `layout` is what this rank owns of it."""
    num_sum_elements = 0 if unit.num_sum_elements == layout.num_state_elements else unit.num_sum_elements
    return ShardShares(unit.params, unit.grads, unit.resident_tiles, unit.num_sums, num_sum_elements)


def residencies_of(pieces: CutModel, plan: Plan) -> dict[int, Residency]:
    """Weights on the compute tier stay; they may be read at any time where nothing of their update is left for later.

    Weights that every use gathers from the parts of all ranks do not stay, wherever the parts are.
    """
    found = {}
    for group, layouts, unit in zip(pieces.groups, pieces.unit_layouts, plan.units, strict=True):
        all_resident = unit.num_nvme_tiles == 0 and unit.grads is not Tier.NVME
        index = layouts.owned.index
        found[index] = Residency.RESIDENT if all_resident or not group.units else Residency.KEPT
        if layouts.gathers_weights or (group.units and unit.params is not plan.compute_tier):
            found[index] = Residency.ABSENT
    return found
