"""Bytes between ranks and between host and GPU, and which stage is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import decoder_400m, request_400m, split_units

from infinity.byte_sizes import GIB, MIB
from infinity.placement import Link, Owner, Placement, PlanRequest, Schedule, UnitSize, choose_stage, make_plan
from infinity.placement.links import collective_counts, collective_lines
from infinity.placement.stages import PARTITIONED
from infinity.states import Tier

RANKS = 4


def over_ranks(stage: int, **changes: object) -> PlanRequest:
    """The decoder on the first of four ranks."""
    return request_400m(
        64 * GIB, Placement(stage=stage), units=split_units(decoder_400m(), stage, RANKS), num_ranks=RANKS, **changes
    )


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_collectives_move_what_theory_says(num_micro_batches: int) -> None:
    """2P a step in stages 0 to 2; stage 3: 3P for any A in vertical order, 3P a micro-batch in horizontal order."""

    def times(stage: int, schedule: Schedule) -> int:
        counts = collective_counts(over_ranks(stage, num_micro_batches=num_micro_batches, schedule=schedule))
        return counts.weight_gathers + counts.reductions + counts.gradient_gathers

    assert [times(stage, Schedule.VERTICAL) for stage in PARTITIONED] == [2, 2, 2, 3]
    expected = [2, 2, 1 + num_micro_batches, 3 * num_micro_batches]
    assert [times(stage, Schedule.HORIZONTAL) for stage in PARTITIONED] == expected


def test_bytes_between_ranks() -> None:
    """Elements x bytes x (N - 1) / N: bf16 weights (the root's once), fp32 sums; nothing for one rank."""
    units = over_ranks(3).units
    weights, elements = sum(u.gather_bytes for u in units), sum(u.num_gradient_elements for u in units)
    root, reduced = units[-1].gather_bytes, 4 * elements * 3 // 4
    expected = [
        {"gradients reduced": reduced, "gradients gathered": 2 * elements * 3 // 4},
        {"gradients reduced": reduced, "weights gathered": weights * 3 // 4},
        {"gradients reduced": reduced, "weights gathered": weights * 3 // 4},
        {"gradients reduced": reduced, "weights gathered": (2 * weights - root) * 3 // 4},
    ]
    last = sum(unit.gather_bytes for unit in units[-3:-1]) * 3 // 4  # in the two slots when forward turns into backward
    for stage in PARTITIONED:
        request = over_ranks(stage)
        assert {line.what: line.num_bytes for line in collective_lines(request)} == expected[stage]
        assert collective_lines(request) == make_plan(request).links
        assert sum(line.bytes_in_slots for line in collective_lines(request)) == (last if stage == 3 else 0)
    assert collective_lines(request_400m()) == ()


def test_bytes_between_host_and_gpu() -> None:
    """Weights that stay on the GPU go there once, others for both directions; gradients come back once."""
    units = decoder_400m()
    weights = sum(unit.weight_bytes for unit in units)
    for words, num_uploads in (("gpu", 1), ("cpu", 2)):
        request = request_400m(64 * GIB, Placement().override("*", params=words), gpu_memory_bytes=64 * GIB)
        assert {(line.link, line.what): line.num_bytes for line in make_plan(request).links} == {
            (Link.TO_GPU, "weights"): num_uploads * weights - (num_uploads - 1) * units[-1].weight_bytes,
            (Link.TO_HOST, "gradients"): sum(request.finished_bytes(unit) for unit in units),
        }
    assert make_plan(request_400m(64 * GIB)).links == ()


def test_partitioned_weights_need_slots_and_are_rerun_wherever_they_are() -> None:
    """A rank that keeps its part on the compute tier gathers the rest into slots at every use; nothing is kept."""
    request = over_ranks(3)
    units = tuple(replace(unit, kept_bytes=0 if unit.is_root else GIB) for unit in request.units)
    plan = make_plan(replace(request, units=units))
    assert {unit.params for unit in plan.units} == {Tier.CPU}
    assert (plan.num_weight_slots, plan.weight_slot_bytes) == (2, max(unit.gathered_weight_bytes for unit in units))
    assert [unit.name for unit in plan.units if not unit.reruns] == ["root"]
    assert plan.owner_bytes(Owner.ACTIVATIONS) == 64 * MIB
    assert plan.owner_bytes(Owner.WEIGHTS) == sum(unit.weight_bytes for unit in units) + units[-1].gathered_weight_bytes


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
