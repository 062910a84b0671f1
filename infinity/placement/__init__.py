"""Where every model state should live: pure, torch-free, frozen values out; nothing here knows how a plan is executed."""

from infinity.placement.explain import smallest_cpu_memory_bytes
from infinity.placement.placement import Placement, UnitPlacement
from infinity.placement.plan import DirectoryLine, DiskLine, MemoryLine, Owner, Plan, TrafficLine, UnitPlan
from infinity.placement.planner import make_plan
from infinity.placement.request import PlanRequest, Schedule
from infinity.placement.sizes import UnitSize
from infinity.placement.stages import PARTITIONED, is_partitioned

__all__ = [
    "PARTITIONED",
    "DirectoryLine",
    "DiskLine",
    "MemoryLine",
    "Owner",
    "Placement",
    "Plan",
    "PlanRequest",
    "Schedule",
    "TrafficLine",
    "UnitPlacement",
    "UnitPlan",
    "UnitSize",
    "is_partitioned",
    "make_plan",
    "smallest_cpu_memory_bytes",
]
