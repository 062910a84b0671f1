"""Bytes between ranks and between host and GPU, and which stage is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import decoder_400m, request_400m

from infinity.byte_sizes import GIB, MIB
from infinity.placement import Owner, Placement, PlanRequest, Schedule, UnitSize, choose_stage, make_plan
from infinity.placement.links import Link, collective_counts, collective_lines, host_lines
from infinity.placement.stages import PARTITIONED
from infinity.states import Tier

RANKS = 4


def gathered() -> tuple[UnitSize, ...]:
    """The decoder as one of four ranks has its weights in stage 3; everything else is left whole."""
    return tuple(
        unit
        if unit.is_root
        else replace(
            unit,
            is_split=not unit.is_root,
            gathers_weights=not unit.is_root,
            weight_bytes=unit.gathered_weight_bytes // RANKS // 4096 * 4096,
        )
        for unit in decoder_400m()
    )


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_collectives_move_what_theory_says(num_micro_batches: int) -> None:
    """2P a step in stages 0 to 2; stage 3: 3P for any A in vertical order, 3P a micro-batch in horizontal order."""

    def times(stage: int, schedule: Schedule) -> int:
        counts = collective_counts(stage, num_micro_batches=num_micro_batches, schedule=schedule)
        return counts.weight_gathers + counts.reductions + counts.gradient_gathers

    assert [times(stage, Schedule.VERTICAL) for stage in PARTITIONED] == [2, 2, 2, 3]
    expected = [2, 2, 1 + num_micro_batches, 3 * num_micro_batches]
    assert [times(stage, Schedule.HORIZONTAL) for stage in PARTITIONED] == expected


def test_bytes_between_ranks() -> None:
    """Elements x bytes x (N - 1) / N: bf16 weights (the root's once), fp32 sums; nothing for one rank."""
    units = decoder_400m()
    request = request_400m(units=units)
    weights, elements = sum(u.gathered_weight_bytes for u in units), sum(u.num_gradient_elements for u in units)
    root = units[-1].gathered_weight_bytes
    stage_3 = {line.what: line.num_bytes for line in collective_lines(request, stage=3, num_ranks=RANKS)}
    assert stage_3 == {"weights gathered": (2 * weights - root) * 3 // 4, "gradients reduced": 4 * elements * 3 // 4}
    stage_0 = {line.what: line.num_bytes for line in collective_lines(request, stage=0, num_ranks=RANKS)}
    assert stage_0 == {"gradients reduced": 4 * elements * 3 // 4, "gradients gathered": 2 * elements * 3 // 4}
    assert collective_lines(request, stage=3, num_ranks=1) == ()


def test_bytes_between_host_and_gpu() -> None:
    """Weights that stay on the GPU go there once, others for both directions; gradients come back once."""
    units = decoder_400m()
    weights = sum(unit.weight_bytes for unit in units)
    for words, num_uploads in (("gpu", 1), ("cpu", 2)):
        request = request_400m(64 * GIB, Placement().override("*", params=words), gpu_memory_bytes=64 * GIB)
        lines = host_lines(request, make_plan(request))
        assert {(line.link, line.what): line.num_bytes for line in lines} == {
            (Link.TO_GPU, "weights"): num_uploads * weights - (num_uploads - 1) * units[-1].weight_bytes,
            (Link.TO_HOST, "gradients"): sum(request.finished_bytes(unit) for unit in units),
        }
    assert host_lines(request_400m(64 * GIB), make_plan(request_400m(64 * GIB))) == ()


def test_partitioned_weights_need_slots_and_are_rerun_wherever_they_are() -> None:
    """A rank that keeps its part on the compute tier gathers the rest into slots at every use; nothing is kept."""
    units = tuple(replace(unit, kept_bytes=0 if unit.is_root else GIB) for unit in gathered())
    plan = make_plan(request_400m(64 * GIB, units=units))
    assert {unit.params for unit in plan.units} == {Tier.CPU}
    assert (plan.num_weight_slots, plan.weight_slot_bytes) == (2, max(unit.gathered_weight_bytes for unit in units))
    assert [unit.name for unit in plan.units if not unit.reruns] == ["root"]
    assert plan.owner_bytes(Owner.ACTIVATIONS) == 64 * MIB
    assert plan.owner_bytes(Owner.WEIGHTS) == sum(unit.weight_bytes for unit in units)


def test_the_gradient_that_waits_is_counted_apart_from_the_state() -> None:
    """In stage 1 a rank has a part of the optimizer state and the whole gradient."""
    units = tuple(replace(unit, num_state_elements=unit.num_state_elements // RANKS) for unit in decoder_400m())
    plan = make_plan(request_400m(64 * GIB, units=units))
    assert plan.owner_bytes(Owner.GRADIENTS) == make_plan(request_400m(64 * GIB)).owner_bytes(Owner.GRADIENTS)


def request(cpu_memory_bytes: int, units: tuple[UnitSize, ...] | None = None) -> PlanRequest:
    return request_400m(cpu_memory_bytes, units=units or decoder_400m())


def test_the_stage_that_offloads_least_is_taken() -> None:
    """Stage 3 where it alone keeps everything off the disk; the reason says what the lower one would have moved."""
    plans = {0: make_plan(request(2 * GIB)), 3: make_plan(request(8 * GIB))}
    choice = choose_stage(plans)
    assert choice is not None
    assert choice.stage == 3
    assert "nothing on NVMe" in choice.reason
    assert "stage 0: " in choice.reason
    assert "over NVMe a step" in choice.reason


def test_of_equal_stages_the_lowest_is_taken() -> None:
    """Two stages that keep everything in memory: the lower one. One alone is taken as it is; of none there is no choice."""
    plan = make_plan(request(8 * GIB))
    lowest, only = choose_stage({2: plan, 1: plan}), choose_stage({3: plan})
    assert lowest is not None
    assert only is not None
    assert (lowest.stage, only.stage) == (1, 3)
    assert choose_stage({}) is None
