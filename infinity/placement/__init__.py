"""Where every model state should live: pure, torch-free, frozen values out; nothing here knows how a plan is executed."""

from infinity.placement.explain import smallest_cpu_memory_bytes
from infinity.placement.placement import Placement, UnitPlacement
from infinity.placement.plan import DirectoryLine, DiskLine, Link, LinkLine, MemoryLine, Owner, Plan, TrafficLine, UnitPlan
from infinity.placement.planner import make_plan
from infinity.placement.request import GradientReduction, PlanRequest, Schedule
from infinity.placement.sizes import UnitSize
from infinity.placement.slot_choices import plan_with_slots
from infinity.placement.stage_choice import StageChoice, choose_stage, plan_best_stage
from infinity.placement.stages import PARTITIONED, is_partitioned
from infinity.placement.zero_memory import StateBytes, state_bytes, textbook_bytes

__all__ = [
    "PARTITIONED",
    "DirectoryLine",
    "DiskLine",
    "GradientReduction",
    "Link",
    "LinkLine",
    "MemoryLine",
    "Owner",
    "Placement",
    "Plan",
    "PlanRequest",
    "Schedule",
    "StageChoice",
    "StateBytes",
    "TrafficLine",
    "UnitPlacement",
    "UnitPlan",
    "UnitSize",
    "choose_stage",
    "is_partitioned",
    "make_plan",
    "plan_best_stage",
    "plan_with_slots",
    "smallest_cpu_memory_bytes",
    "state_bytes",
    "textbook_bytes",
]
