"""The estimate: memory by tier and owner, NVMe bytes by state, for units whose tiers are decided."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.byte_sizes import PAGE_BYTES, format_bytes, round_up
from infinity.placement.draft import Draft
from infinity.placement.plan import DiskLine, MemoryLine, Owner, TrafficLine
from infinity.placement.request import FP32_BYTES, GradientReduction, PlanRequest, Schedule
from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier


def memory_lines(request: PlanRequest, drafts: Sequence[Draft], *, num_tile_slots: int) -> tuple[MemoryLine, ...]:
    """Return the peak of every owner that holds anything; peaks of owners may coincide, so a tier's peak is their sum."""
    compute = request.compute_tier
    lines = [*_weight_lines(request, drafts), *_gradient_lines(request, drafts, num_tile_slots), *reduction_lines(request)]
    state_bytes = sum(draft.cpu_state_bytes for draft in drafts)
    held = "resident tiles of master weights and moments" if request.torch_values is None else "fp32 master weights"
    lines.append(MemoryLine(Tier.CPU, Owner.OPTIMIZER, state_bytes, held))
    if any(draft.has_nvme_tiles for draft in drafts):
        slot_bytes = tile_slot_bytes(drafts)
        counts = f"{num_tile_slots} buffers of {format_bytes(slot_bytes)} that tiles stream through"
        lines.append(MemoryLine(Tier.CPU, Owner.TILE_SLOTS, num_tile_slots * slot_bytes, counts))
    lines += _torch_lines(request)
    lines.append(_activation_line(request, drafts))
    lines.append(MemoryLine(compute, Owner.ROOT, request.root_bytes, "buffers and values of no unit"))
    return tuple(line for line in lines if line.num_bytes)


def tier_bytes(lines: Sequence[MemoryLine], tier: Tier) -> int:
    """Return the sum of a tier's lines."""
    return sum(line.num_bytes for line in lines if line.tier is tier)


def weight_slots(request: PlanRequest, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return number and bytes of the buffers on the compute tier for units whose whole weights are not there for good."""
    sizes = [draft.unit.gathered_weight_bytes for draft in drafts if not draft.stays_on(request.compute_tier)]
    return min(len(sizes), request.num_weight_slots), max(sizes, default=0)


def host_weight_slots(request: PlanRequest, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return number and bytes of the staging buffers in RAM for weights on NVMe that are used elsewhere.

    That is on a GPU, or in the whole unit that every rank's part is gathered into.
    """
    away = [draft.unit for draft in drafts if draft.params in (None, Tier.NVME)]
    sizes = [unit.weight_bytes for unit in away if request.compute_tier is Tier.GPU or unit.gathers_weights]
    if not sizes:
        return 0, 0
    return weight_slots(request, drafts)[0], max(sizes)


def last_in_slots(slotted: Sequence[UnitSize], num_slots: int) -> tuple[UnitSize, ...]:
    """Return the units in the slots when forward turns into backward, which needs them first: the last ones of `slotted`.

    What is called more than once is called last, too, as a head that is tied to an embedding.
    """
    again = [unit for unit in slotted if unit.visits > 1]
    once = [unit for unit in slotted if unit.visits == 1]
    return (*once, *again)[max(0, len(slotted) - num_slots) :]


def first_in_slots(slotted: Sequence[UnitSize], num_slots: int) -> tuple[UnitSize, ...]:
    """Return the units in the slots when backward turns into the next forward: the first ones."""
    return tuple(slotted[:num_slots])


def gradient_slots(request: PlanRequest, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Return number and bytes of the buffers through which gradients on NVMe are read and written; 0 where none is there.

    One does, but where a unit's sum is on its way into its reduction while the unit before comes out of its own.
    """
    num_bytes = max((draft.waiting_bytes for draft in drafts if draft.grads in (None, Tier.NVME)), default=0)
    if not num_bytes:
        return 0, 0
    return 2 if request.num_ranks > 1 and _waits_whole(request) else 1, num_bytes


def device_gradient_bytes(request: PlanRequest) -> int:
    """Return the bytes of the one buffer on a GPU that finished gradients leave it from."""
    return max(request.finished_bytes(unit) for unit in request.units)


def tile_gradient_bytes(request: PlanRequest) -> int:
    """Return the bytes of one tile's gradient as read from NVMe: its pages, which its neighbours may share."""
    return round_up(request.tile_elements * request.grad_element_bytes, PAGE_BYTES) + PAGE_BYTES


def tile_slot_bytes(drafts: Sequence[Draft]) -> int:
    """Return the bytes of the largest tile of any unit."""
    return max((draft.largest_tile_bytes for draft in drafts), default=0)


def traffic_lines(request: PlanRequest, drafts: Sequence[Draft]) -> tuple[TrafficLine, ...]:
    """Return the NVMe bytes of one step: V_r and V_w, by state."""
    state = sum(draft.nvme_state_bytes for draft in drafts)
    spilled = [draft for draft in drafts if draft.grads in (None, Tier.NVME)]
    finished = sum(request.finished_bytes(draft.unit) for draft in spilled)
    sums = sum(request.sums_traffic_bytes(draft.unit) for draft in spilled)
    lines = (
        TrafficLine("optimizer state", state, state, state),
        _weight_traffic(request, drafts),
        TrafficLine("gradients", finished + sums, finished + sums, finished + sums),
    )
    return tuple(line for line in lines if line.formula_read_bytes or line.write_bytes)


def disk_lines(drafts: Sequence[Draft]) -> tuple[DiskLine, ...]:
    """Return the bytes that each state takes on NVMe."""
    lines = (
        DiskLine("optimizer state", sum(draft.nvme_state_bytes for draft in drafts)),
        DiskLine("weights", _nvme_weight_bytes(drafts)),
        DiskLine("gradients", sum(d.waiting_bytes for d in drafts if d.grads in (None, Tier.NVME))),
    )
    return tuple(line for line in lines if line.num_bytes)


def whole_weight_bytes(request: PlanRequest, drafts: Sequence[Draft]) -> int:
    """Return the bytes of whole weights that stay on the compute tier beside their place in RAM, where Adam updates them.

    They are two where the compute tier is a GPU, or this rank updates a part only; otherwise one buffer is both.
    """
    kept = [draft.unit for draft in drafts if draft.stays_on(request.compute_tier)]
    is_gpu = request.compute_tier is Tier.GPU
    return sum(unit.gathered_weight_bytes for unit in kept if is_gpu or unit.is_split)


def reduction_bytes(request: PlanRequest) -> int:
    """Return the bytes of the buffers on the compute tier in which one unit's gradient is summed over ranks; 0 for one rank.

    Where every rank updates everything, one rank's rounded part of the sum is sent from a buffer of its own.
    """
    if request.num_ranks == 1:
        return 0
    largest = max(unit.num_gradient_elements for unit in request.units)
    sums = round_up(largest * request.reduced_element_bytes, PAGE_BYTES)
    if is_partitioned(request.stage, StateKind.OPTIM):
        return sums
    return sums + round_up(largest // request.num_ranks * request.grad_element_bytes, PAGE_BYTES)


def reduction_lines(request: PlanRequest) -> list[MemoryLine]:
    """Return what sums over ranks take: their buffers on the compute tier, and what collectives take in RAM."""
    buffers, counts = reduction_bytes(request), "one unit's gradient while it is summed over ranks"
    if request.compute_tier is Tier.CPU:
        return [MemoryLine(Tier.CPU, Owner.REDUCTION, buffers + request.scratch_bytes, f"{counts}, and what that takes")]
    return [
        MemoryLine(Tier.GPU, Owner.REDUCTION, buffers, counts),
        MemoryLine(Tier.CPU, Owner.REDUCTION, request.scratch_bytes, "what collectives take"),
    ]


def _torch_lines(request: PlanRequest) -> list[MemoryLine]:
    if request.torch_values is None:
        return []
    num_elements = sum(unit.num_state_elements for unit in request.units)
    kept = request.torch_values * FP32_BYTES * num_elements
    copied = 0 if request.grad_element_bytes == FP32_BYTES else FP32_BYTES * num_elements
    each = f"what torch's optimizer keeps: {request.torch_values} x {FP32_BYTES} bytes an element"
    return [
        MemoryLine(Tier.CPU, Owner.RULE_STATE, kept, each),
        MemoryLine(Tier.CPU, Owner.RULE_GRADIENTS, copied, "gradients as torch's optimizer takes them, while it steps"),
    ]


def _weight_lines(request: PlanRequest, drafts: Sequence[Draft]) -> list[MemoryLine]:
    whole = whole_weight_bytes(request, drafts)
    # Also of those on the GPU: they are the half of the master that the CPU's Adam updates.
    stored = sum(draft.unit.weight_bytes for draft in drafts if draft.params in (Tier.GPU, Tier.CPU))
    if request.compute_tier is Tier.GPU:
        lines = [
            MemoryLine(Tier.GPU, Owner.WEIGHTS, whole, "compute weights that stay on the GPU"),
            MemoryLine(Tier.CPU, Owner.WEIGHTS, stored, "weights that stay in RAM"),
        ]
    else:
        beside = f", {format_bytes(whole)} of it whole beside the parts that this rank updates" if whole else ""
        lines = [MemoryLine(Tier.CPU, Owner.WEIGHTS, stored + whole, f"weights that stay in RAM{beside}")]
    number, slot_bytes = weight_slots(request, drafts)
    num_host, host_bytes = host_weight_slots(request, drafts)
    counts = f"{number} buffers of {format_bytes(slot_bytes)} for the units in use"
    host_counts = f"{num_host} buffers of {format_bytes(host_bytes)} for weights on their way from and to NVMe"
    if request.compute_tier is Tier.GPU:
        lines.append(MemoryLine(Tier.GPU, Owner.WEIGHT_SLOTS, number * slot_bytes, counts))
        lines.append(MemoryLine(Tier.CPU, Owner.WEIGHT_SLOTS, num_host * host_bytes, host_counts))
    else:
        both = f"{counts}, and {host_counts}" if num_host else counts
        lines.append(MemoryLine(Tier.CPU, Owner.WEIGHT_SLOTS, number * slot_bytes + num_host * host_bytes, both))
    return lines


def _gradient_lines(request: PlanRequest, drafts: Sequence[Draft], num_tile_slots: int) -> list[MemoryLine]:
    what = "fp32 sums between micro-batches" if request.keeps_sums else "finished gradients"
    if request.keeps_sums and request.reduction is GradientReduction.MICRO_BATCH:
        what = "this rank's part of fp32 sums between micro-batches"
    waiting_bytes = sum(d.waiting_bytes for d in drafts if d.grads is Tier.CPU)
    lines = [MemoryLine(Tier.CPU, Owner.GRADIENTS, waiting_bytes, f"{what} that wait for the update")]
    if request.compute_tier is Tier.GPU:
        counts = "one unit's gradient on its way to RAM"
        lines.append(MemoryLine(Tier.GPU, Owner.GRADIENT_SLOTS, device_gradient_bytes(request), counts))
    num_slots, slot_bytes = gradient_slots(request, drafts)
    if num_slots:
        pages = num_tile_slots * tile_gradient_bytes(request)
        whose = "one unit's gradient" if num_slots == 1 else "two units' gradients"
        counts = f"{whose} on the way to NVMe, and {num_tile_slots} tiles' gradients on their way back"
        lines.append(MemoryLine(Tier.CPU, Owner.GRADIENT_SLOTS, num_slots * slot_bytes + pages, counts))
    lines.append(_accumulator_line(request))
    return lines


def _accumulator_line(request: PlanRequest) -> MemoryLine:
    """Sums of a unit live until its last call is through: one unit's at a time, and all of those called more than once.

    Sums that wait between micro-batches are counted as gradients: then only what backward has just made is here.
    """
    # An unfinished unit may be the one that a neighbour's accumulators coexist with, so the two kinds add up.
    passing = max((_sum_bytes(request, unit) for unit in request.units if not _is_long(request, unit)), default=0)
    lasting = sum(_sum_bytes(request, unit) for unit in request.units if _is_long(request, unit))
    is_fp32 = not request.keeps_sums and request.num_micro_batches > 1
    counts = "fp32 sums over micro-batches" if is_fp32 else "gradients as backward makes them"
    if any(unit.visits > 1 for unit in request.units) and not _waits_whole(request):
        counts += ", one for each call of a unit"
    counts += " of the largest unit" + (", and of those called more than once" if lasting else "")
    return MemoryLine(request.compute_tier, Owner.ACCUMULATORS, passing + lasting, counts)


def _is_long(request: PlanRequest, unit: UnitSize) -> bool:
    return not _waits_whole(request) and (unit.visits > 1 or unit.is_root)


def _waits_whole(request: PlanRequest) -> bool:
    """Whether what backward makes is added to sums of whole units that wait, as soon as it is there."""
    return request.keeps_sums and request.reduction is GradientReduction.BOUNDARY


def _sum_bytes(request: PlanRequest, unit: UnitSize) -> int:
    num_summed = 1 if request.keeps_sums else request.num_micro_batches
    is_fp32 = not _waits_whole(request) and (num_summed > 1 or unit.visits > 1)
    element_bytes = request.grad_element_bytes  # of the micro-batch that is being added
    if is_fp32:
        element_bytes += FP32_BYTES * unit.visits
    return round_up(unit.num_gradient_elements * element_bytes, PAGE_BYTES)


def _activation_line(request: PlanRequest, drafts: Sequence[Draft]) -> MemoryLine:
    num_alive = request.num_micro_batches if request.schedule is Schedule.VERTICAL else 1
    kept = 0
    if not request.recompute:
        kept = num_alive * sum(d.unit.kept_bytes for d in drafts if d.stays_on(request.compute_tier))
    counts = "inputs of units and one unit's working set"
    if kept:
        counts += f", and {format_bytes(kept)} that autograd keeps of units that are not rerun"
    return MemoryLine(request.compute_tier, Owner.ACTIVATIONS, request.activation_bytes + kept, counts)


def _weight_traffic(request: PlanRequest, drafts: Sequence[Draft]) -> TrafficLine:
    absent = [draft.unit for draft in drafts if draft.params in (None, Tier.NVME)]
    num_passes = request.num_micro_batches if request.schedule is Schedule.HORIZONTAL else 1
    formula = sum(2 * num_passes * unit.visits * unit.weight_bytes for unit in absent)
    # Also the first ones stay when the step ends: their update finds them in the slots.
    slotted = [draft.unit for draft in drafts if not draft.stays_on(request.compute_tier)]
    on_nvme = {unit.name for unit in absent}
    found = (*last_in_slots(slotted, request.num_weight_slots), *first_in_slots(slotted, request.num_weight_slots))
    hits = num_passes * sum(unit.weight_bytes for unit in found if unit.name in on_nvme)
    written = sum(unit.weight_bytes for unit in absent if unit.num_state_elements)
    return TrafficLine("weights", formula - hits, written, formula)


def _nvme_weight_bytes(drafts: Sequence[Draft]) -> int:
    return sum(draft.unit.weight_bytes for draft in drafts if draft.params in (None, Tier.NVME))
