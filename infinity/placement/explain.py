"""What to say when nothing fits: needed against available, the smallest workable budget, the cheapest ways out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infinity.byte_sizes import MIB, format_bytes
from infinity.errors import DoesNotFit
from infinity.placement.estimate import disk_lines, memory_lines
from infinity.placement.placement import Placement
from infinity.placement.plan import MemoryLine
from infinity.placement.request import GradientReduction, PlanRequest, Schedule
from infinity.placement.search import Candidate, candidates, decided, fits_gpu, smallest_gpu_bytes
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier

_MAX_WAYS_OUT = 3


def smallest_cpu_memory_bytes(request: PlanRequest) -> int | None:
    """Return the smallest `cpu_memory_bytes` with which this request has a plan; None where no amount of RAM is enough."""
    smallest = _smallest(request)
    return None if smallest is None else smallest.cpu_bytes


def gpu_does_not_fit(request: PlanRequest) -> DoesNotFit:
    """Return the error for a GPU budget that no placement keeps to."""
    needed = smallest_gpu_bytes(request)
    lines = memory_lines(request, decided(request), num_tile_slots=request.min_tile_slots)
    return DoesNotFit(
        f"The GPU needs at least {format_bytes(needed)} and has {format_bytes(request.gpu_memory_bytes or 0)}"
        f"{_largest(lines, Tier.GPU)}.",
        remedy=f"--gpu-memory {budget_text(needed)} would do; so may smaller micro-batches or a smaller largest unit"
        f"{_stage_words(request)}.",
    )


def cpu_does_not_fit(request: PlanRequest) -> DoesNotFit:
    """Return the error for a RAM budget that no placement keeps to."""
    smallest = _smallest(request)
    if smallest is None:
        return _disk_does_not_fit(request)
    lines = memory_lines(request, smallest.drafts, num_tile_slots=smallest.num_tile_slots)
    num_ranks = request.num_local_ranks
    ways = [f"--cpu-memory {budget_text(smallest.cpu_bytes * num_ranks)} would do", *_ways_out(request)]
    return DoesNotFit(
        f"RAM: at least {format_bytes(smallest.cpu_bytes * num_ranks)} needed, "
        f"{format_bytes(request.cpu_memory_bytes * num_ranks)} available{_nvme_words(request)}{_ranks_words(request)}"
        f"{_largest(lines, Tier.CPU)}.",
        remedy=f"{'; '.join(ways)}{_stage_words(request)}.",
    )


def budget_text(num_bytes: int) -> str:
    """Return a size that the command line takes and that is not below `num_bytes`."""
    return f"{-(-num_bytes // MIB)}MiB"


def _smallest(request: PlanRequest) -> Candidate | None:
    drafts = decided(request)
    if not fits_gpu(request, drafts):
        return None
    return min(candidates(request, drafts, None), key=lambda candidate: candidate.cpu_bytes, default=None)


def _disk_does_not_fit(request: PlanRequest) -> DoesNotFit:
    """Everything that may stay in RAM does, and still the rest is too large for the disk."""
    least = [
        replace(
            draft.with_tiles(tuple(range(draft.unit.num_tiles))) if draft.has_free_tiles else draft,
            params=draft.params or Tier.CPU,
            grads=draft.grads or Tier.CPU,
        )
        for draft in decided(request)
    ]
    needed = sum(line.num_bytes for line in disk_lines(least))
    return DoesNotFit(
        f"NVMe: {format_bytes(needed * request.num_local_ranks)} needed, "
        f"{format_bytes((request.nvme_free_bytes or 0) * request.num_local_ranks)} available{_ranks_words(request)}.",
        remedy="Free space, add a directory with --nvme, or choose auto for --offload-optimizer and --offload-params, "
        "so that RAM takes a share.",
    )


def _nvme_words(request: PlanRequest) -> str:
    if not request.has_nvme:
        return ", no NVMe directory given"
    if request.nvme_free_bytes is None:
        return ""
    return f", {format_bytes(request.nvme_free_bytes * request.num_local_ranks)} free on NVMe"


def _ranks_words(request: PlanRequest) -> str:
    return f", for {request.num_local_ranks} ranks together" if request.num_local_ranks > 1 else ""


def _stage_words(request: PlanRequest) -> str:
    """What the units of another stage would take is not known here."""
    if request.num_ranks == 1 or is_partitioned(request.stage, StateKind.PARAM):
        return ""
    return "; so may --stage 3, which leaves each rank its part of the weights"


def _largest(lines: tuple[MemoryLine, ...], tier: Tier) -> str:
    largest = sorted((line for line in lines if line.tier is tier), key=lambda line: line.num_bytes, reverse=True)[:3]
    words = ", ".join(f"{line.owner.value} {format_bytes(line.num_bytes)}" for line in largest)
    return f" (largest: {words})" if words else ""


def _ways_out(request: PlanRequest) -> list[str]:
    """Return the changes that make the request fit its budget on their own, the cheapest for the user first."""
    fitting = []
    for words, changed in _changes(request):
        needed = smallest_cpu_memory_bytes(changed)
        if needed is not None and needed <= request.cpu_memory_bytes:
            fitting.append(f"{words} would do with {format_bytes(needed * request.num_local_ranks)} of RAM")
        if len(fitting) == _MAX_WAYS_OUT:
            break
    return fitting


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if not request.has_nvme:
        yield "an NVMe directory", replace(request, has_nvme=True, nvme_free_bytes=None)
    elif request.nvme_free_bytes is not None:
        yield "more free space on NVMe", replace(request, nvme_free_bytes=None)
    if request.keeps_sums and request.num_ranks > 1 and request.reduction is GradientReduction.BOUNDARY:
        in_parts = replace(request, gradient_reduction=GradientReduction.MICRO_BATCH)
        yield "infinity.gradient_reduction micro_batch", in_parts
    if request.keeps_sums:
        yield "--schedule vertical", replace(request, schedule=Schedule.VERTICAL)
    if not request.recompute:
        yield "infinity.recompute true", replace(request, recompute=True)
    if request.min_tile_slots > 2:
        yield "infinity.tile_slots 2", replace(request, min_tile_slots=2)
    free = Placement(stage=request.placement.stage)
    yield "auto for every state (--offload-optimizer auto --offload-params auto)", replace(request, placement=free)
    yield "half the micro-batch size or sequence length", replace(request, activation_bytes=request.activation_bytes // 2)
    if request.num_micro_batches > 1:
        yield "--micro-batches 1", replace(request, num_micro_batches=1)
