"""What the planner is asked: units, budgets, placement, and the shape of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.placement.placement import Placement
from infinity.placement.sizes import UnitSize
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier

FP32_BYTES = 4


class Schedule(str, Enum):
    """The order of work in a step."""

    VERTICAL = "vertical"  # every micro-batch through a unit before the next unit
    HORIZONTAL = "horizontal"  # the whole model for each micro-batch


class GradientReduction(str, Enum):
    """When gradients are summed over ranks."""

    BOUNDARY = "boundary"  # once a step: every rank's sum over its micro-batches
    MICRO_BATCH = "micro_batch"  # in horizontal order each micro-batch, into sums of this rank's part


def reduction_of_sums(asked: GradientReduction | None, *, stage: int, num_ranks: int) -> GradientReduction:
    """Return when gradients of micro-batches that run backward one by one are summed over ranks."""
    if num_ranks == 1:
        return GradientReduction.BOUNDARY
    if asked is not None:
        return asked
    return GradientReduction.MICRO_BATCH if is_partitioned(stage, StateKind.GRAD) else GradientReduction.BOUNDARY


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The planner's input. Budgets count for this rank, above what the process needs before any model exists."""

    units: tuple[UnitSize, ...]  # in forward order
    placement: Placement
    cpu_memory_bytes: int
    gpu_memory_bytes: int | None  # None: the CPU plays the compute tier
    num_micro_batches: int
    activation_bytes: int  # what autograd keeps between units, and the largest working set inside a unit, tail included
    grad_element_bytes: int
    tile_elements: int  # of the largest tile
    min_tile_slots: int = 3  # one is read, one computed, one written
    max_tile_slots: int = 8
    num_weight_slots: int = 2  # one unit runs while the next is fetched
    schedule: Schedule = Schedule.VERTICAL
    recompute: bool = False  # rerun also the units whose weights stay on the compute tier
    root_bytes: int = 0  # buffers and whatever else stays on the compute tier
    has_nvme: bool = True  # whether a directory was given
    nvme_free_bytes: int | None = None  # this rank's part; None: not asked
    torch_values: int | None = None  # fp32 an element that an optimizer of torch keeps beside the tiles; None: it has none
    num_local_ranks: int = 1  # that share the machine: what an error says of RAM and disk is for all of them
    num_ranks: int = 1
    gradient_reduction: GradientReduction | None = None  # None: each micro-batch where gradients are partitioned
    reduced_element_bytes: int = FP32_BYTES  # of a gradient while it is summed over ranks
    scratch_bytes: int = 0  # of RAM, that collectives take for as long as the ranks are together

    @property
    def compute_tier(self) -> Tier:
        return Tier.CPU if self.gpu_memory_bytes is None else Tier.GPU

    @property
    def disk_limit_bytes(self) -> int | None:
        """The most that may live on NVMe; None where nobody asked."""
        return self.nvme_free_bytes if self.has_nvme else 0

    @property
    def keeps_sums(self) -> bool:
        """Whether fp32 sums of every unit wait between micro-batches."""
        return self.schedule is Schedule.HORIZONTAL and self.num_micro_batches > 1

    @property
    def stage(self) -> int:
        return self.placement.stage or 0

    @property
    def reduction(self) -> GradientReduction:
        """When gradients are summed over ranks. Where no sums wait between micro-batches, they are reduced once a step."""
        if not self.keeps_sums:
            return GradientReduction.BOUNDARY
        return reduction_of_sums(self.gradient_reduction, stage=self.stage, num_ranks=self.num_ranks)

    def num_sums(self, unit: UnitSize) -> int:
        """How many fp32 sums of a unit's gradient wait between micro-batches.

        One for each visit, for visits are added when all micro-batches are there; one where each micro-batch is reduced.
        """
        if not self.keeps_sums or not unit.num_waiting_elements:
            return 0
        return 1 if self.reduction is GradientReduction.MICRO_BATCH else unit.visits

    def num_sum_elements(self, unit: UnitSize) -> int:
        """Elements of one of these sums: the whole unit's until it is reduced, then those of this rank's part."""
        is_reduced = self.reduction is GradientReduction.MICRO_BATCH
        return unit.num_gradient_elements // self.num_ranks if is_reduced else unit.num_gradient_elements

    def sum_bytes(self, unit: UnitSize) -> int:
        """Bytes of one of these sums."""
        return round_up(self.num_sum_elements(unit) * FP32_BYTES, PAGE_BYTES)

    def finished_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's finished gradient on this rank."""
        return round_up(unit.num_waiting_elements * self.grad_element_bytes, PAGE_BYTES)

    def waiting_bytes(self, unit: UnitSize) -> int:
        """Bytes in which a unit's gradient waits: its sums, in whose place it is finished, or itself alone."""
        return max(self.num_sums(unit) * self.sum_bytes(unit), self.finished_bytes(unit))

    def sums_traffic_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's sums that are written in one step, and as many read, where they wait on NVMe.

        Each sum crosses between two micro-batches, and all but the last one once more until they are added up. Parameters
        of no unit get gradients all the way through backward, so theirs give way to others every time. So do parts of what
        was reduced: they are rounded when the reduction of the last unit is over.
        """
        num_sums = self.num_sums(unit)
        if not num_sums:
            return 0
        stays_last = not unit.is_root and self.reduction is GradientReduction.BOUNDARY
        num_crossings = num_sums * self.num_micro_batches - (1 if stays_last else 0)
        return num_crossings * self.sum_bytes(unit)
