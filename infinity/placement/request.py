"""What the planner is asked: units, budgets, placement, and the shape of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.placement.placement import Placement
from infinity.placement.sizes import UnitSize
from infinity.states import Tier

FP32_BYTES = 4


class Schedule(str, Enum):
    """The order of work in a step."""

    VERTICAL = "vertical"  # every micro-batch through a unit before the next unit
    HORIZONTAL = "horizontal"  # the whole model for each micro-batch


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
    num_local_ranks: int = 1  # that share the machine: what an error says of RAM and disk is for all of them

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

    def num_sums(self, unit: UnitSize) -> int:
        """How many fp32 sums of a unit's gradient wait between micro-batches: one for each visit, or none."""
        return unit.visits if self.keeps_sums and unit.num_waiting_elements else 0

    def finished_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's finished gradient."""
        return round_up(unit.num_waiting_elements * self.grad_element_bytes, PAGE_BYTES)

    def waiting_bytes(self, unit: UnitSize) -> int:
        """Bytes in which a unit's gradient waits: its sums, in whose place it is finished, or itself alone."""
        sums = self.num_sums(unit) * round_up(unit.num_waiting_elements * FP32_BYTES, PAGE_BYTES)
        return max(sums, self.finished_bytes(unit))

    def sums_traffic_bytes(self, unit: UnitSize) -> int:
        """Bytes of a unit's sums that are written in one step, and as many read, where they wait on NVMe.

        Each sum crosses between two micro-batches, and all but the last one once more until they are added up. Parameters
        of no unit get gradients all the way through backward, so theirs give way to others every time.
        """
        num_sums = self.num_sums(unit)
        if not num_sums:
            return 0
        num_crossings = num_sums * self.num_micro_batches - (0 if unit.is_root else 1)
        return num_crossings * round_up(unit.num_waiting_elements * FP32_BYTES, PAGE_BYTES)
