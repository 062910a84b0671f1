"""What the planner chooses, and what it says when nothing fits, on a known model of 403 M parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import decoder_400m, request_400m, unit_size

from infinity.byte_sizes import GIB, MIB, PAGE_BYTES, round_up
from infinity.errors import ConfigError, DoesNotFit
from infinity.placement import Owner, Placement, Plan, PlanRequest, Schedule, make_plan, smallest_cpu_memory_bytes
from infinity.states import Tier

ALL_ON_NVME = Placement().override("*", optim="nvme", params="nvme")


def moved_bytes(plan: Plan) -> int:
    return plan.nvme_read_bytes + plan.nvme_write_bytes


def test_forced_nvme_puts_state_and_weights_whole_on_disk() -> None:
    """With everything forced to NVMe no tile and no weights stay in 1 GiB; gradients wait in RAM as far as they fit."""
    plan = make_plan(request_400m(GIB, ALL_ON_NVME))
    assert not any(unit.resident_tiles for unit in plan.units)
    assert {unit.params for unit in plan.units if unit.name != "root"} == {Tier.NVME}
    assert sum(unit.grads is Tier.CPU for unit in plan.units) > 20
    assert plan.memory_bytes(Tier.CPU) <= GIB


def test_forced_nvme_ignores_spare_memory() -> None:
    """Forced NVMe leaves no resident tile however much RAM there is; gradients then all wait in RAM."""
    plan = make_plan(request_400m(64 * GIB, ALL_ON_NVME))
    assert plan.owner_bytes(Owner.OPTIMIZER) == 0
    assert {unit.grads for unit in plan.units} == {Tier.CPU}
    assert plan.disk_bytes == sum(u.state_bytes for u in decoder_400m()) + sum(u.weight_bytes for u in decoder_400m()[:-1])


def test_forced_nvme_moves_the_bytes_of_the_formula() -> None:
    """V_r is state plus two reads of the weights, V_w state plus weights; the two turns save the slots' units."""
    plan = make_plan(request_400m(8 * GIB, ALL_ON_NVME))
    units = decoder_400m()
    state, weights = sum(u.state_bytes for u in units), sum(u.weight_bytes for u in units[:-1])
    in_slots = sum(u.weight_bytes for u in (*units[:2], *units[:-1][-2:]))
    assert plan.nvme_formula_read_bytes == state + 2 * weights
    assert plan.nvme_read_bytes == state + 2 * weights - in_slots
    assert plan.nvme_write_bytes == state + weights


def test_horizontal_order_reads_weights_for_every_micro_batch_and_keeps_sums() -> None:
    """Horizontal order costs 2A reads of the weights, less the turns, and fp32 sums that are spilled and counted.

    A sum crosses A - 1 times; the root group's, to which gradients come all the way, once more.
    """
    forced = ALL_ON_NVME.override("*", grads="nvme")
    plan = make_plan(request_400m(GIB, forced, schedule=Schedule.HORIZONTAL, num_micro_batches=3))
    units = decoder_400m()
    weights, elements = sum(u.weight_bytes for u in units[:-1]), [u.num_state_elements for u in units]
    traffic = {line.what: line for line in plan.traffic}
    turns = 3 * sum(u.weight_bytes for u in (*units[:2], *units[24:26]))
    assert traffic["weights"].formula_read_bytes == 6 * weights
    assert traffic["weights"].read_bytes == 6 * weights - turns
    sums = sum(round_up(4 * count, PAGE_BYTES) for count in elements)
    finished = sum(round_up(2 * count, PAGE_BYTES) for count in elements)
    root = round_up(4 * elements[-1], PAGE_BYTES)
    assert traffic["gradients"].write_bytes == traffic["gradients"].read_bytes == 2 * sums + root + finished
    assert {line.what: line.num_bytes for line in plan.disk}["gradients"] == sums


def test_sums_of_several_visits_cross_once_more_before_they_are_added_up() -> None:
    """Two visits of a tied unit have a sum each: A - 1 crossings of both, and one of that which is complete first."""
    units = (unit_size("a", 64_000), unit_size("tied", 64_000, visits=2))
    forced = ALL_ON_NVME.override("*", grads="nvme")
    plan = make_plan(request_400m(128 * MIB, forced, units=units, schedule=Schedule.HORIZONTAL, num_micro_batches=4))
    traffic = {line.what: line for line in plan.traffic}
    finished = 2 * round_up(2 * 64_000, PAGE_BYTES)
    assert traffic["gradients"].write_bytes == (3 + 7) * round_up(4 * 64_000, PAGE_BYTES) + finished
    assert [unit.num_sums for unit in plan.units] == [1, 2]
    assert plan.gradient_slot_bytes == 2 * round_up(4 * 64_000, PAGE_BYTES)


def test_weights_then_gradients_then_tiles_fill_the_memory() -> None:
    """With 2.4 GiB weights and gradients are in RAM and the rest holds tiles, spread evenly over the blocks."""
    plan = make_plan(request_400m(int(2.4 * GIB)))
    assert {unit.params for unit in plan.units} == {Tier.CPU}
    assert {unit.grads for unit in plan.units} == {Tier.CPU}
    counts = [len(unit.resident_tiles) for unit in plan.units if unit.name.startswith("blocks")]
    assert max(counts) - min(counts) <= 1
    assert min(counts) > 0
    slack = int(2.4 * GIB) - plan.memory_bytes(Tier.CPU)
    assert slack < 8 * MIB


def test_everything_stays_in_memory_that_fits() -> None:
    """With enough RAM nothing is on NVMe, and there are no slots."""
    plan = make_plan(request_400m(8 * GIB))
    assert not plan.uses_nvme
    assert moved_bytes(plan) == plan.num_tile_slots == plan.num_weight_slots == 0
    assert not any(unit.reruns for unit in plan.units)


def test_memory_falls_from_compute_tier_to_ram_to_nvme() -> None:
    """The peak in RAM falls monotonically as states go to NVMe (C33)."""
    asked = [
        Placement().override("*", optim="cpu", params="cpu", grads="cpu"),
        Placement().override("*", optim="nvme", params="cpu", grads="cpu"),
        Placement().override("*", optim="nvme", params="nvme", grads="cpu"),
        Placement().override("*", optim="nvme", params="nvme", grads="nvme"),
    ]
    peaks = [make_plan(request_400m(64 * GIB, placement)).memory_bytes(Tier.CPU) for placement in asked]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_memory_falls_from_gpu_to_ram() -> None:
    """On a machine with a GPU its peak falls as states leave it (C33)."""
    words = ["gpu", "cpu", "nvme"]
    plans = [
        make_plan(request_400m(64 * GIB, Placement().override("*", optim=w, params=w, grads=w), gpu_memory_bytes=64 * GIB))
        for w in words
    ]
    gpu = [plan.memory_bytes(Tier.GPU) for plan in plans]
    assert gpu[0] > gpu[1] == gpu[2]
    assert plans[1].memory_bytes(Tier.CPU) > plans[2].memory_bytes(Tier.CPU)


def test_a_large_gpu_holds_all_weights_and_a_small_one_leaves_some_in_ram() -> None:
    """Weights that are in RAM go on to the GPU as far as it reaches; they keep their place in RAM, as does all else."""
    whole = make_plan(request_400m(8 * GIB, gpu_memory_bytes=16 * GIB))
    assert {unit.params for unit in whole.units} == {Tier.GPU}
    assert {unit.num_nvme_tiles for unit in whole.units} == {0}
    weight_bytes = sum(unit.weight_bytes for unit in decoder_400m())
    assert [line.num_bytes for line in whole.memory if line.owner is Owner.WEIGHTS] == [weight_bytes, weight_bytes]
    assert whole.num_weight_slots == whole.num_host_weight_slots == 0
    split = make_plan(request_400m(2 * GIB, gpu_memory_bytes=2 * GIB))
    assert split.uses_nvme
    assert {unit.params for unit in split.units} == {Tier.GPU}
    assert any(unit.cpu_tiles for unit in split.units)
    slots = make_plan(request_400m(8 * GIB, gpu_memory_bytes=500 * MIB))
    assert {unit.params for unit in slots.units} == {Tier.GPU, Tier.CPU}
    assert (slots.num_weight_slots, slots.num_host_weight_slots) == (2, 0)
    disk = make_plan(request_400m(GIB, ALL_ON_NVME, gpu_memory_bytes=16 * GIB))
    assert (disk.num_weight_slots, disk.num_host_weight_slots) == (2, 2)


def test_gradients_and_optimizer_state_stay_off_the_gpu() -> None:
    """The CPU updates them, so that a request for the GPU means RAM; one gradient buffer on the GPU lets them leave it."""
    everything = Placement().override("*", optim="gpu", params="gpu", grads="gpu")
    plan = make_plan(request_400m(8 * GIB, everything, gpu_memory_bytes=16 * GIB))
    assert {unit.grads for unit in plan.units} == {Tier.CPU}
    assert {unit.num_nvme_tiles for unit in plan.units} == {0}
    on_gpu = {line.owner: line.num_bytes for line in plan.memory if line.tier is Tier.GPU}
    assert Owner.OPTIMIZER not in on_gpu
    assert Owner.GRADIENTS not in on_gpu
    assert on_gpu[Owner.GRADIENT_SLOTS] == round_up(2 * max(u.num_state_elements for u in decoder_400m()), PAGE_BYTES)


def test_gpu_means_memory_on_a_machine_without_one() -> None:
    """A request for the GPU is recorded as CPU memory where the CPU plays the compute tier."""
    plan = make_plan(request_400m(8 * GIB, Placement().override("*", optim="gpu", params="gpu", grads="gpu")))
    assert {unit.params for unit in plan.units} | {unit.grads for unit in plan.units} == {Tier.CPU}
    assert all(unit.resident_tiles == set(range(unit.num_tiles)) for unit in plan.units)


def test_shares_are_kept_tile_by_tile_and_spread() -> None:
    """Half of the optimizer state in RAM is half of every unit's tiles, not its first half."""
    placement = Placement().override("blocks.*", optim={"cpu": 0.5, "nvme": 0.5})
    plan = make_plan(request_400m(6 * GIB, placement))
    for unit in plan.units[1:25]:
        assert len(unit.cpu_tiles) == round(unit.num_tiles / 2)
        assert unit.cpu_tiles != tuple(range(len(unit.cpu_tiles)))


def test_accumulators_are_fp32_of_the_largest_unit_and_in_grad_dtype_for_one_micro_batch() -> None:
    """Several micro-batches: 4 bytes for each element beside the gradient that is being added; one: that gradient alone."""
    largest = max(u.num_gradient_elements for u in decoder_400m())
    several, one = make_plan(request_400m(8 * GIB)), make_plan(request_400m(8 * GIB, num_micro_batches=1))
    root = round_up(6 * 1024, PAGE_BYTES)
    assert several.owner_bytes(Owner.ACCUMULATORS) == round_up(6 * largest, PAGE_BYTES) + root
    assert one.owner_bytes(Owner.ACCUMULATORS) == round_up(2 * largest, PAGE_BYTES) + PAGE_BYTES


def test_a_unit_called_twice_has_two_accumulators_and_four_reads() -> None:
    """A unit with two visits keeps one fp32 sum for each until both are through, and is loaded for each."""
    units = (unit_size("a", 64_000), unit_size("b", 64_000, visits=2))
    request = request_400m(128 * MIB, ALL_ON_NVME, units=units, num_micro_batches=1)
    plan = make_plan(request)
    assert plan.owner_bytes(Owner.ACCUMULATORS) == round_up(2 * 64_000, PAGE_BYTES) + round_up(
        (2 + 2 * 4) * 64_000, PAGE_BYTES
    )
    weights = next(line for line in plan.traffic if line.what == "weights")
    assert weights.formula_read_bytes == (2 + 4) * units[0].weight_bytes


def test_kept_activations_count_for_resident_units_only() -> None:
    """A unit that is not rerun keeps its graph for every micro-batch of a vertical step; rerun units keep nothing."""
    units = tuple(unit_size(f"u{i}", 64_000, kept_bytes=MIB) for i in range(3))
    resident = request_400m(GIB, units=units)
    absent = replace(resident, placement=ALL_ON_NVME)
    assert make_plan(resident).owner_bytes(Owner.ACTIVATIONS) == 64 * MIB + 4 * 3 * MIB
    assert make_plan(replace(resident, schedule=Schedule.HORIZONTAL)).owner_bytes(Owner.ACTIVATIONS) == 64 * MIB + 3 * MIB
    assert make_plan(replace(resident, recompute=True)).owner_bytes(Owner.ACTIVATIONS) == 64 * MIB
    assert make_plan(absent).owner_bytes(Owner.ACTIVATIONS) == 64 * MIB
    assert all(unit.reruns for unit in make_plan(absent).units)


def test_tail_memory_does_not_depend_on_micro_batches() -> None:
    """With the weights absent nothing but the estimate of activations depends on the number of micro-batches."""
    four, sixteen = (make_plan(request_400m(GIB, ALL_ON_NVME, num_micro_batches=n)) for n in (4, 16))
    assert four == sixteen


@pytest.mark.parametrize("budget", [40 * MIB, 150 * MIB])
def test_too_little_memory_says_what_would_do(budget: int) -> None:
    """The error names needed and available bytes, and a budget that the planner accepts (C40)."""
    request = request_400m(budget)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(request)
    smallest = smallest_cpu_memory_bytes(request)
    assert smallest is not None
    named = -(-smallest // MIB)
    assert f"--cpu-memory {named}MiB would do" in str(caught.value)
    assert "needed" in str(caught.value)
    assert "available" in str(caught.value)
    assert make_plan(replace(request, cpu_memory_bytes=named * MIB))


@pytest.mark.parametrize(
    ("request_", "way"),
    [
        (request_400m(GIB, has_nvme=False), "an NVMe directory would do"),
        (request_400m(GIB, Placement().override("*", optim="cpu")), "auto for every state"),
        (
            request_400m(700 * MIB, ALL_ON_NVME.override("*", grads="cpu"), schedule=Schedule.HORIZONTAL),
            "auto for every state",
        ),
        (
            request_400m(1500 * MIB, ALL_ON_NVME.override("*", grads="cpu"), schedule=Schedule.HORIZONTAL),
            "--schedule vertical",
        ),
        (request_400m(400 * MIB, activation_bytes=256 * MIB), "half the micro-batch size"),
        (request_400m(GIB, nvme_free_bytes=GIB), "more free space on NVMe"),
    ],
    ids=["no-nvme", "forced-cpu", "forced-grads", "horizontal", "activations", "disk"],
)
def test_ways_out_that_work_are_named(request_: PlanRequest, way: str) -> None:
    """A change that makes the request fit on its own is named, with what it needs then."""
    with pytest.raises(DoesNotFit) as caught:
        make_plan(request_)
    assert way in str(caught.value)


def test_forced_nvme_that_is_larger_than_the_disk_says_so() -> None:
    """No amount of RAM helps where forced states exceed the disk; the error says needed and free."""
    request = request_400m(64 * GIB, ALL_ON_NVME, nvme_free_bytes=GIB)
    assert smallest_cpu_memory_bytes(request) is None
    with pytest.raises(DoesNotFit, match=r"NVMe: 4\.\d\d GiB needed, 1\.00 GiB available"):
        make_plan(request)


def test_gpu_that_is_too_small_says_what_would_do() -> None:
    """A GPU budget below the slots and accumulators is named with one that works."""
    request = request_400m(8 * GIB, gpu_memory_bytes=64 * MIB)
    with pytest.raises(DoesNotFit, match=r"--gpu-memory (\d+)MiB would do") as caught:
        make_plan(request)
    named = int(str(caught.value).split("--gpu-memory ")[1].split("MiB")[0])
    assert make_plan(replace(request, gpu_memory_bytes=named * MIB))
    with pytest.raises(DoesNotFit):
        make_plan(replace(request, gpu_memory_bytes=(named - 1) * MIB))


def test_nvme_without_a_directory_is_an_error() -> None:
    """A state that is forced to NVMe needs a directory."""
    with pytest.raises(ConfigError, match="no directory is given"):
        make_plan(request_400m(8 * GIB, ALL_ON_NVME, has_nvme=False))


def test_impossible_slots_are_refused() -> None:
    """Slot numbers below one, or a minimum above the maximum, are errors."""
    with pytest.raises(ConfigError, match="no numbers of slots"):
        make_plan(request_400m(8 * GIB, min_tile_slots=9, max_tile_slots=8))
