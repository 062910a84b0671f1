"""One rank's plan, line by line, against formulas written out for small units: every stage, tier and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from infinity.byte_sizes import GIB, MIB, PAGE_BYTES, round_up
from infinity.errors import ConfigError, DoesNotFit
from infinity.placement import (
    GradientReduction,
    Owner,
    Placement,
    Plan,
    PlanRequest,
    Schedule,
    UnitSize,
    make_plan,
    plan_best_stage,
)
from infinity.placement.stages import PARTITIONED
from infinity.states import Tier
from infinity.store.layout import ParameterSpec
from infinity.store.unit_size import unit_layouts, unit_size

ELEMENTS = {"a": 100_000, "b": 30_001, "root": 1000}
A = 4  # micro-batches
ACTIVATIONS, SCRATCH = 64 * 1024, 3 * MIB


def pages(num_bytes: int) -> int:
    return round_up(num_bytes, PAGE_BYTES)


def part(name: str, num_ranks: int) -> int:
    """Elements of one rank's part: an equal share of what is padded to 64, padded to 64."""
    return round_up(-(-round_up(ELEMENTS[name], 64) // num_ranks), 64)


def owned(name: str, stage: int, num_ranks: int) -> int:
    """Elements that one rank updates and stores."""
    return part(name, num_ranks) * (1 if stage else num_ranks)


def units_of(stage: int, num_ranks: int, rank: int = 0) -> tuple[UnitSize, ...]:
    sizes = []
    for name, numel in ELEMENTS.items():
        specs = [ParameterSpec(f"{name}.weight", (numel,), "bfloat16", trainable=True)]
        layouts = unit_layouts(
            0, name, specs, tile_elements=8192, stage=stage, num_ranks=num_ranks, rank=rank, is_root=name == "root"
        )
        sizes.append(unit_size(layouts, is_root=name == "root"))
    return tuple(sizes)


def request(stage: int, num_ranks: int, *, rank: int = 0, **changes: object) -> PlanRequest:
    """One rank's, with room for everything; `params` and `optim` ask for tiers."""
    placement = Placement(stage=stage)
    tiers = {key: changes.pop(key) for key in ("params", "optim", "grads") if key in changes}
    if tiers:
        placement = placement.override("*", **tiers)  # type: ignore[arg-type]
    values: dict[str, object] = {
        "units": units_of(stage, num_ranks, rank),
        "placement": placement,
        "cpu_memory_bytes": GIB,
        "gpu_memory_bytes": None,
        "num_micro_batches": A,
        "activation_bytes": ACTIVATIONS,
        "grad_element_bytes": 2,
        "tile_elements": 8192,
        "num_ranks": num_ranks,
        "num_local_ranks": num_ranks,
        "scratch_bytes": SCRATCH if num_ranks > 1 else 0,
    }
    return PlanRequest(**(values | changes))  # type: ignore[arg-type]


def lines(plan: Plan) -> Mapping[tuple[Tier, Owner], int]:
    return {(line.tier, line.owner): line.num_bytes for line in plan.memory}


def tile_bytes(name: str, stage: int, num_ranks: int) -> list[int]:
    """bf16: the low half of the master and two moments, 10 bytes an element, in whole pages a tile."""
    left = owned(name, stage, num_ranks)
    return [pages(10 * min(8192, left - start)) for start in range(0, left, 8192)]


def weights_on_cpu(stage: int, num_ranks: int) -> int:
    """The store's part of each unit; beside it the whole where it stays and is another buffer."""
    stored = sum(pages(2 * owned(name, stage, num_ranks)) for name in ELEMENTS)
    if num_ranks == 1 or stage == 0:
        return stored
    staying = ("root",) if stage == 3 else tuple(ELEMENTS)
    return stored + sum(pages(2 * part(name, num_ranks) * num_ranks) for name in staying)


def reduction(stage: int, num_ranks: int) -> int:
    """The largest unit in fp32; in stage 0 one rank's rounded part of it; what sums over gloo take."""
    if num_ranks == 1:
        return 0
    largest = pages(4 * part("a", num_ranks) * num_ranks)
    return largest + (pages(2 * part("a", num_ranks)) if stage == 0 else 0) + SCRATCH


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", PARTITIONED)
def test_every_line_of_a_rank_without_gpu_is_its_formula(stage: int, num_ranks: int) -> None:
    """All in RAM: what a rank updates and stores is its part from stage 1 on, what it computes with is whole (C43)."""
    plan = make_plan(request(stage, num_ranks))
    gathers = stage == 3 and num_ranks > 1
    whole = {name: part(name, num_ranks) * num_ranks for name in ELEMENTS}
    # fp32 sums of the largest unit over four micro-batches beside the bf16 gradient that is added; the root's last all step.
    accumulators = pages(6 * whole["a"]) + pages(6 * whole["root"])
    expected = {
        Owner.WEIGHTS: weights_on_cpu(stage, num_ranks),
        Owner.WEIGHT_SLOTS: 2 * pages(2 * whole["a"]) if gathers else 0,
        Owner.GRADIENTS: sum(pages(2 * owned(name, stage, num_ranks)) for name in ELEMENTS),
        Owner.ACCUMULATORS: accumulators,
        Owner.REDUCTION: reduction(stage, num_ranks),
        Owner.OPTIMIZER: sum(sum(tile_bytes(name, stage, num_ranks)) for name in ELEMENTS),
        Owner.ACTIVATIONS: ACTIVATIONS,
    }
    assert lines(plan) == {(Tier.CPU, owner): num_bytes for owner, num_bytes in expected.items() if num_bytes}
    assert plan.reduction_bytes + (SCRATCH if num_ranks > 1 else 0) == expected[Owner.REDUCTION]
    assert (plan.stage, plan.num_ranks, plan.disk_bytes) == (stage, num_ranks, 0)
    assert [unit.reruns for unit in plan.units] == [gathers, gathers, False]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", PARTITIONED)
def test_a_rank_keeps_only_what_it_owns_on_nvme(stage: int, num_ranks: int) -> None:
    """Tiles, and in stage 3 weights, are those of the part; weights come through a buffer of the part beside the slot."""
    params = {"params": "nvme"} if stage == 3 else {}
    plan = make_plan(request(stage, num_ranks, optim="nvme", **params))
    disk = {line.what: line.num_bytes for line in plan.disk}
    assert disk.pop("optimizer state") == sum(sum(tile_bytes(name, stage, num_ranks)) for name in ELEMENTS)
    found = lines(plan)
    if stage < 3:
        assert not disk
        assert found[Tier.CPU, Owner.WEIGHTS] == weights_on_cpu(stage, num_ranks)
        return
    parts = {name: pages(2 * part(name, num_ranks)) for name in ELEMENTS}
    assert disk == {"weights": parts["a"] + parts["b"]}
    slot = pages(2 * part("a", num_ranks) * num_ranks)
    assert (plan.num_weight_slots, plan.weight_slot_bytes) == (2, slot)
    assert (plan.num_host_weight_slots, plan.host_weight_slot_bytes) == (2, parts["a"])
    assert found[Tier.CPU, Owner.WEIGHT_SLOTS] == 2 * slot + 2 * parts["a"]
    assert found[Tier.CPU, Owner.WEIGHTS] == parts["root"] + pages(2 * part("root", num_ranks) * num_ranks)
    traffic = {line.what: line for line in plan.traffic}
    assert traffic["weights"].formula_read_bytes == 2 * (parts["a"] + parts["b"])
    assert traffic["weights"].write_bytes == parts["a"] + parts["b"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", PARTITIONED)
def test_weights_of_a_rank_with_a_gpu(stage: int, num_ranks: int) -> None:
    """Whole weights that stay are on the GPU; in stage 3 slots are, and what is asked onto the GPU waits in RAM in parts."""
    plan = make_plan(request(stage, num_ranks, gpu_memory_bytes=GIB, scratch_bytes=0, params="gpu"))
    found, gathers = lines(plan), stage == 3 and num_ranks > 1
    whole = {name: pages(2 * part(name, num_ranks) * num_ranks) for name in ELEMENTS}
    stored = sum(pages(2 * owned(name, stage, num_ranks)) for name in ELEMENTS)
    assert found[Tier.GPU, Owner.WEIGHTS] == (whole["root"] if gathers else sum(whole.values()))
    assert found[Tier.CPU, Owner.WEIGHTS] == stored
    assert found.get((Tier.GPU, Owner.WEIGHT_SLOTS), 0) == (2 * whole["a"] if gathers else 0)
    assert (Tier.CPU, Owner.WEIGHT_SLOTS) not in found
    assert found.get((Tier.GPU, Owner.REDUCTION), 0) == max(0, reduction(stage, num_ranks) - SCRATCH)
    assert found[Tier.GPU, Owner.GRADIENT_SLOTS] == pages(2 * owned("a", stage, num_ranks))
    assert [unit.params for unit in plan.units] == [Tier.CPU if gathers else Tier.GPU] * 2 + [Tier.GPU]


def test_units_of_small_parameters_stay_whole_in_stage_3() -> None:
    """A unit without a parameter above the threshold has no slot, is not rerun, and stays where weights go to NVMe."""
    specs = [ParameterSpec(name, (numel,), "bfloat16", trainable=True) for name, numel in (("weight", 500), ("bias", 64))]

    def unit(kept_elements: int) -> UnitSize:
        return unit_size(
            unit_layouts(0, "norm", specs, tile_elements=8192, stage=3, num_ranks=2, kept_elements=kept_elements)
        )

    assert (unit(499).gathers_weights, unit(500).gathers_weights) == (True, False)
    planned = request(3, 2, params="nvme")
    plan = make_plan(replace(planned, units=(*planned.units, unit(500))))
    assert [one.params for one in plan.units] == [Tier.NVME, Tier.NVME, Tier.CPU, Tier.CPU]
    assert [one.reruns for one in plan.units] == [True, True, False, False]


REDUCTIONS = [None, *GradientReduction]


@pytest.mark.parametrize("asked", REDUCTIONS)
@pytest.mark.parametrize("stage", PARTITIONED)
def test_sums_between_micro_batches_wait_whole_or_in_parts(stage: int, asked: GradientReduction | None) -> None:
    """Horizontal order: whole until the boundary in stages 0 and 1, parts of what is reduced at once in stages 2 and 3."""
    plan = make_plan(request(stage, 4, schedule=Schedule.HORIZONTAL, gradient_reduction=asked))
    by_default = GradientReduction.MICRO_BATCH if stage >= 2 else GradientReduction.BOUNDARY
    in_parts = (asked or by_default) is GradientReduction.MICRO_BATCH
    elements = {name: part(name, 4) * (1 if in_parts else 4) for name in ELEMENTS}
    waiting = sum(max(pages(4 * elements[name]), pages(2 * owned(name, stage, 4))) for name in ELEMENTS)
    assert lines(plan)[Tier.CPU, Owner.GRADIENTS] == waiting
    assert [(unit.num_sums, unit.num_sum_elements) for unit in plan.units] == [(1, elements[name]) for name in ELEMENTS]
    moved = {line.what: line.num_bytes for line in plan.links}
    everything = sum(part(name, 4) * 4 for name in ELEMENTS)
    assert moved["gradients reduced"] == (A if in_parts else 1) * 4 * everything * 3 // 4
    assert plan.gradient_reduction == ("micro_batch" if in_parts else "boundary")
    # What is reduced at once is the root's, too, when backward is over; sums that wait have taken it by then.
    made = pages(2 * part("a", 4) * 4) + (pages(2 * part("root", 4) * 4) if in_parts else 0)
    assert lines(plan)[Tier.CPU, Owner.ACCUMULATORS] == made


@pytest.mark.parametrize("reduction", list(GradientReduction))
def test_whole_sums_on_nvme_need_a_second_buffer(reduction: GradientReduction) -> None:
    """One unit's sum goes into its reduction while the part of the unit before comes out and is written."""
    plan = make_plan(request(1, 2, schedule=Schedule.HORIZONTAL, gradient_reduction=reduction, grads="nvme"))
    is_whole = reduction is GradientReduction.BOUNDARY
    slot = pages(4 * part("a", 2) * (2 if is_whole else 1))
    assert (plan.num_gradient_slots, plan.gradient_slot_bytes) == (2 if is_whole else 1, slot)
    assert lines(plan)[Tier.CPU, Owner.GRADIENT_SLOTS] == plan.num_gradient_slots * slot + (plan.num_tile_slots or 8) * (
        pages(2 * 8192) + PAGE_BYTES
    )
    sums = {line.what: line for line in plan.traffic}["gradients"]
    finished = sum(pages(2 * part(name, 2)) for name in ELEMENTS)
    crossings = {name: A if name == "root" or not is_whole else A - 1 for name in ELEMENTS}
    moved = sum(crossings[name] * pages(4 * part(name, 2) * (2 if is_whole else 1)) for name in ELEMENTS)
    assert (sums.read_bytes, sums.write_bytes) == (finished + moved, finished + moved)


def test_vertical_order_reduces_once_whatever_is_asked() -> None:
    """There no sums wait between micro-batches."""
    plan = make_plan(request(3, 2, gradient_reduction=GradientReduction.MICRO_BATCH))
    assert (plan.gradient_reduction, {unit.num_sums for unit in plan.units}) == ("boundary", {0})


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_ranks_together_hold_every_state_once(stage: int, num_ranks: int) -> None:
    """State and stored weights over all ranks are the model's, with less than 64 elements of padding a unit and rank."""
    ranks = [units_of(stage, num_ranks, rank) for rank in range(num_ranks)]
    for number, numel in enumerate(ELEMENTS.values()):
        together = sum(units[number].num_state_elements for units in ranks)
        assert numel <= together < round_up(numel, 64) + 64 * num_ranks
        assert together == ranks[0][number].num_gradient_elements
        assert sum(units[number].weight_bytes for units in ranks) < 2 * together + PAGE_BYTES * num_ranks
    assert len({replace_names(units) for units in ranks}) == 1  # so that all of them make the same plan


def replace_names(units: tuple[UnitSize, ...]) -> tuple[UnitSize, ...]:
    return tuple(replace(unit, name="") for unit in units)


@pytest.mark.parametrize("params", ["nvme", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_stay_on_the_compute_tier(stage: int, params: str) -> None:
    """With several ranks weights leave the compute tier in stage 3 alone; the error says so, and one rank may always."""
    gpu = GIB if params == "cpu" else None
    with pytest.raises(ConfigError, match=f"in stage {stage} each of 2 ranks") as raised:
        make_plan(request(stage, 2, params=params, gpu_memory_bytes=gpu))
    assert "--stage 3" in raised.value.remedy
    assert make_plan(request(stage, 1, params=params, gpu_memory_bytes=gpu)).num_weight_slots
    assert make_plan(request(3, 2, params=params, gpu_memory_bytes=gpu)).num_weight_slots


def best(cpu_memory_bytes: int, **changes: object) -> Plan:
    return plan_best_stage(lambda stage: make_plan(request(stage, 4, cpu_memory_bytes=cpu_memory_bytes, **changes)))


def test_the_best_stage_is_the_lowest_that_offloads_least() -> None:
    """With room stage 0, where only parts fit stage 1, where weights must leave stage 3; the plan says why."""
    assert best(GIB).stage == 0
    assert "No higher stage offloads less" in best(GIB).stage_reason
    assert best(GIB, params="nvme").stage == 3
    least = make_plan(request(1, 4)).memory_bytes(Tier.CPU)
    assert best(least).stage == 1
    said = dict(best(least).lines())["zero stage"]
    assert said.startswith("1 on 4 ranks: optimizer state partitioned; gradients are reduced once a step. It is the lowest")
    assert "(not 0)" in said
    with pytest.raises(DoesNotFit, match="for 4 ranks together"):
        best(MIB)


def test_reducing_each_micro_batch_is_a_way_out_of_too_little_memory() -> None:
    """Where whole sums that wait are what does not fit, the error names the key under which parts of them do."""
    asked = {"schedule": Schedule.HORIZONTAL, "has_nvme": False}
    least = make_plan(request(1, 4, gradient_reduction=GradientReduction.MICRO_BATCH, **asked)).memory_bytes(Tier.CPU)
    with pytest.raises(DoesNotFit) as raised:
        make_plan(request(1, 4, cpu_memory_bytes=least, **asked))
    assert "infinity.gradient_reduction micro_batch would do" in raised.value.remedy


def test_one_rank_is_told_that_its_stage_changes_nothing() -> None:
    """Every stage has the plan of stage 0, and the row says so."""
    plans = [make_plan(request(stage, 1)) for stage in PARTITIONED]
    assert len({replace(plan, stage=0) for plan in plans}) == 1
    assert [dict(plan.lines())["zero stage"] for plan in plans] == [
        f"{stage}, which changes nothing on one rank" for stage in PARTITIONED
    ]
