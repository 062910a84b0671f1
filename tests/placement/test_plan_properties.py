"""What holds for every plan: it keeps to its budget, adds up, and more memory never costs more I/O."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import requests

from infinity.byte_sizes import MIB, PAGE_BYTES
from infinity.errors import DoesNotFit
from infinity.placement import Owner, Plan, PlanRequest, UnitSize, make_plan, smallest_cpu_memory_bytes
from infinity.states import Tier

spare_bytes = st.integers(0, 12 * MIB)


def fitting_plan(request: PlanRequest, spare: int) -> Plan:
    """The plan with `spare` bytes more than the smallest workable budget."""
    smallest = smallest_cpu_memory_bytes(request)
    assume(smallest is not None)
    assert smallest is not None
    plan = make_plan(replace(request, cpu_memory_bytes=smallest + spare))
    assert plan.memory_bytes(Tier.CPU) <= smallest + spare
    return plan


@settings(max_examples=80, deadline=None)
@given(request=requests(), spare=spare_bytes)
def test_a_plan_never_exceeds_its_budgets(request: PlanRequest, spare: int) -> None:
    """The sum of the predicted peaks is within every tier's budget."""
    plan = fitting_plan(request, spare)
    assert request.gpu_memory_bytes is None or plan.memory_bytes(Tier.GPU) <= request.gpu_memory_bytes
    assert request.gpu_memory_bytes is not None or plan.memory_bytes(Tier.GPU) == 0


@settings(max_examples=80, deadline=None)
@given(request=requests(), spare=spare_bytes, more=st.integers(1, 8 * MIB))
def test_more_memory_never_gives_more_nvme_bytes(request: PlanRequest, spare: int, more: int) -> None:
    """Predicted NVMe bytes of a step fall, or stay, when the budget grows; what fitted still fits."""
    small, large = fitting_plan(request, spare), fitting_plan(request, spare + more)
    assert large.nvme_read_bytes + large.nvme_write_bytes <= small.nvme_read_bytes + small.nvme_write_bytes


@settings(max_examples=80, deadline=None)
@given(request=requests())
def test_the_smallest_workable_budget_works_and_a_page_less_does_not(request: PlanRequest) -> None:
    """The budget that an error names is exactly the limit."""
    smallest = smallest_cpu_memory_bytes(request)
    assume(smallest is not None)
    assert smallest is not None
    assert fitting_plan(request, 0).memory_bytes(Tier.CPU) == smallest
    with pytest.raises(DoesNotFit):
        make_plan(replace(request, cpu_memory_bytes=smallest - PAGE_BYTES))


@settings(max_examples=60, deadline=None)
@given(request=requests(), spare=spare_bytes)
def test_every_byte_is_somewhere_once(request: PlanRequest, spare: int) -> None:
    """State, weights and waiting gradients in memory and on disk add up to the model's, tile by tile."""
    plan = fitting_plan(request, spare)
    disk = {line.what: line.num_bytes for line in plan.disk}
    assert plan.owner_bytes(Owner.OPTIMIZER) + disk.get("optimizer state", 0) == sum(u.state_bytes for u in request.units)
    in_ram = sum(line.num_bytes for line in plan.memory if line.owner is Owner.WEIGHTS and line.tier is Tier.CPU)
    whole = sum(
        size.gathered_weight_bytes
        for size, unit in zip(request.units, plan.units, strict=True)
        if size.is_split and not size.gathers_weights and plan.compute_tier is unit.params is Tier.CPU
    )
    assert in_ram - whole + disk.get("weights", 0) == sum(u.weight_bytes for u in request.units)
    resident = sum(resident_state_bytes(plan, index, unit) for index, unit in enumerate(request.units))
    assert resident == plan.owner_bytes(Owner.OPTIMIZER)
    for unit_plan in plan.units:
        assert unit_plan.resident_tiles <= set(range(unit_plan.num_tiles))
    assert len({(line.tier, line.owner) for line in plan.memory}) == len(plan.memory)
    assert all(line.counts for line in plan.memory)


def resident_state_bytes(plan: Plan, index: int, unit: UnitSize) -> int:
    return sum(unit.tile_bytes[tile] for tile in plan.units[index].resident_tiles)


@settings(max_examples=60, deadline=None)
@given(request=requests(), spare=spare_bytes)
def test_slots_are_there_exactly_where_something_streams(request: PlanRequest, spare: int) -> None:
    """Tile slots go with tiles on NVMe, weight slots with absent weights, gradient slots with spilled gradients."""
    plan = fitting_plan(request, spare)
    num_absent = sum(
        size.gathers_weights or unit.params is not plan.compute_tier
        for size, unit in zip(request.units, plan.units, strict=True)
    )
    assert plan.num_weight_slots == min(num_absent, request.num_weight_slots)
    assert (plan.num_tile_slots > 0) == any(unit.num_nvme_tiles for unit in plan.units)
    assert (plan.num_gradient_slots > 0) == any(unit.grads is Tier.NVME for unit in plan.units)
    assert plan.owner_bytes(Owner.TILE_SLOTS) == plan.num_tile_slots * plan.tile_slot_bytes
    host = plan.num_host_weight_slots * plan.host_weight_slot_bytes
    assert plan.owner_bytes(Owner.WEIGHT_SLOTS) == plan.num_weight_slots * plan.weight_slot_bytes + host


@settings(max_examples=30, deadline=None)
@given(request=requests(), spare=spare_bytes)
def test_a_plan_is_plain_json_and_readable_rows(request: PlanRequest, spare: int) -> None:
    """The saved plan survives JSON, holds the totals, and its rows are pairs of words."""
    plan = fitting_plan(request, spare)
    saved = plan.to_json()
    assert json.loads(json.dumps(saved)) == saved
    assert saved["nvme_write_bytes"] == plan.nvme_write_bytes
    assert all(isinstance(label, str) and isinstance(value, str) and label and value for label, value in plan.lines())


@settings(max_examples=60, deadline=None)
@given(request=requests(), spare=spare_bytes, free=st.integers(MIB, 16 * MIB))
def test_a_plan_never_exceeds_the_free_disk(request: PlanRequest, spare: int, free: int) -> None:
    """Where the free space is known, what is on NVMe fits there."""
    plan = fitting_plan(replace(request, nvme_free_bytes=free), spare)
    assert plan.disk_bytes <= free
