"""Horizontal order with several micro-batches: fp32 sums wait where the plan put them, and no promise breaks by it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BRANCHY,
    BULK,
    DROPOUT_GPT,
    LORA_GPT_EMBEDDING,
    ODD_MLP,
    TINY_GPT,
    Bulk,
    Kit,
    Run,
    TinyGpt,
    compute_dtype,
    finish_ahead,
    open_engine,
    require_same,
    require_same_state,
    settings,
    train,
    train_engine,
    train_familiarly,
)

from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op
from infinity.config import Config
from infinity.engine import Engine, directories
from infinity.engine.engine import EngineState
from infinity.errors import OverBudget, StorageError
from infinity.placement import Owner, Placement
from infinity.states import Tier

A = 3
WIDTH, NUM_LAYERS, NUM_STEPS = 128, 12, 3
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH
SHARED_LAYER = Kit("shared-layer", lambda: TinyGpt(shared_layer=True), TINY_GPT.micro_batch)
WIDE_BULK = Kit(
    "wide-bulk",
    lambda: Bulk(width=WIDTH, num_layers=NUM_LAYERS),
    lambda generator, step: (torch.randn(2, WIDTH, generator=generator),),
)


def horizontal(nvme: Path, **options: Any) -> dict[str, Any]:
    return settings(nvme, **{"num_micro_batches": A, "schedule": "horizontal", **options})


def all_spilled(config: dict[str, Any]) -> Placement:
    """Every gradient on NVMe, whatever the rest."""
    return Placement.from_config(Config.from_any(config)).override("*", grads="nvme")


def peaks_of(memory: Any) -> dict[str, int]:
    return {line.owner: line.peak_bytes for line in memory if line.tier is Tier.CPU}


# Bits

_REFERENCES: dict[tuple[str, bool], Run] = {}


def reference(kit: Kit, bf16: bool, nvme: Path) -> Run:
    """Return the run in RAM and vertical order."""
    key = (kit.name, bf16)
    if key not in _REFERENCES:
        _REFERENCES[key] = train(kit, settings(nvme, bf16=bf16, num_micro_batches=A))
    return _REFERENCES[key]


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "kit", [ODD_MLP, TINY_GPT, DROPOUT_GPT, SHARED_LAYER, LORA_GPT_EMBEDDING, BRANCHY], ids=lambda kit: kit.name
)
def test_spilled_sums_change_no_bit(kit: Kit, bf16: bool, tiers: tuple[str, str], nvme: Path) -> None:
    """Sums on NVMe, sums in RAM, and vertical order agree: tied, repeated, frozen, unused and root parameters."""
    vertical = reference(kit, bf16, nvme)
    config = horizontal(nvme, bf16=bf16, optim=tiers[0], params=tiers[1])
    require_same(train(kit, config), vertical)
    spilled = train(kit, config, placement=all_spilled(config))
    require_same(spilled, vertical)
    assert spilled.counters["gradient_spill_bytes"] > 0


@pytest.mark.parametrize("kit", [TINY_GPT, BRANCHY], ids=lambda kit: kit.name)
def test_familiar_loop_spills_alike(kit: Kit, nvme: Path) -> None:
    """forward, backward and step with spilled sums have the bits of one train_batch in vertical order."""
    config = horizontal(nvme, optim="nvme", params="nvme")
    run = train_familiarly(kit, config, placement=all_spilled(config))
    require_same(run, train(kit, settings(nvme, num_micro_batches=A)))


def test_tiers_of_sums_may_differ_by_unit(nvme: Path) -> None:
    """Some units' sums on NVMe, others' in RAM, weights resident or absent, in one model."""
    config = horizontal(nvme)
    placement = (
        Placement.from_config(Config.from_any(config))
        .override("layers.[0-4]", optim="nvme", params="nvme", grads="nvme")
        .override("layers.[5-9]", optim="nvme", params="cpu", grads="nvme")
        .override("layers.1[0-4]", optim="cpu", params="nvme", grads="cpu")
        .override("layers.1[5-9]", optim="cpu", params="cpu", grads="nvme")
    )
    require_same(train(BULK, config, placement=placement), train(BULK, settings(nvme, num_micro_batches=A)))


@pytest.mark.parametrize("num", [1, 2, 5])
def test_another_number_of_micro_batches_than_planned(num: int, nvme: Path) -> None:
    """train_batch takes as many as it is given: sums wait as they are planned for, or there are none to wait."""
    config = horizontal(nvme, optim="nvme", params="nvme")
    states = []
    for one, placement in ((config, all_spilled(config)), (settings(nvme), None)):
        with open_engine(TINY_GPT.build(), one, placement=placement) as engine:
            for step in range(2):
                engine.train_batch(TINY_GPT.batches(step, num, torch.bfloat16))
            states.append(engine.state_dict())
    require_same_state(*states)


# Bytes and memory


class Steady:
    """Counters of one steady step, averaged over several."""

    def __init__(self, engine: Engine, kit: Kit, config: dict[str, Any]) -> None:
        def take_steps(first: int, num: int) -> dict[str, int]:
            for step in range(first, first + num):
                engine.train_batch(kit.batches(step, config["gradient_accumulation_steps"], compute_dtype(config)))
                finish_ahead(engine)
            return engine.recorder.counters()

        before, after = take_steps(0, 2), take_steps(2, NUM_STEPS)
        grown = {name: (after[name] - before.get(name, 0)) / NUM_STEPS for name in after}
        self.read_bytes, self.write_bytes = grown["nvme_read_bytes"], grown["nvme_write_bytes"]
        self.spill_bytes = grown["gradient_spill_bytes"]


@pytest.mark.parametrize("num_micro_batches", [2, 4])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_bytes_of_spilled_sums_are_those_of_the_formula(params: str, bf16: bool, num_micro_batches: int, nvme: Path) -> None:
    """gamma' = 1: 4 (A - 1) bytes a parameter are read and as many written, beside g for the finished gradient."""
    config = horizontal(
        nvme, bf16=bf16, optim="nvme", params=params, num_micro_batches=num_micro_batches, tile_bytes="8MiB",
        weight_slots=2, check=False,
    )  # fmt: skip
    with open_engine(WIDE_BULK.build(), config, placement=all_spilled(config)) as engine:
        measured, plan = Steady(engine, WIDE_BULK, config), engine.plan
    state, weight = (10, 2) if bf16 else (8, 4)
    sums, omega = 4 * (num_micro_batches - 1), float(params == "nvme")
    in_slots = omega * num_micro_batches * 2 * 2 * WIDTH * WIDTH * weight
    v_r = NUM_PARAMETERS * (state + 2 * num_micro_batches * weight * omega + weight + sums) - in_slots
    assert measured.read_bytes == pytest.approx(v_r, rel=0.03)
    assert measured.write_bytes == pytest.approx(NUM_PARAMETERS * (state + weight * omega + weight + sums), rel=0.03)
    assert measured.spill_bytes == pytest.approx(NUM_PARAMETERS * (weight + sums), rel=0.03)
    assert measured.read_bytes == pytest.approx(plan.nvme_read_bytes, rel=0.03)
    assert measured.write_bytes == pytest.approx(plan.nvme_write_bytes, rel=0.03)


@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_bytes_of_a_tied_model_are_those_of_the_plan(params: str, nvme: Path) -> None:
    """The tied embedding has two sums, the norm at the end one that gives way to all others: planned to the page."""
    config = horizontal(nvme, optim="cpu", params=params, check=False)
    with open_engine(TINY_GPT.build(), config, placement=all_spilled(config)) as engine:
        measured, plan = Steady(engine, TINY_GPT, config), engine.plan
    gradients = next(line for line in plan.traffic if line.what == "gradients")
    assert measured.spill_bytes == gradients.write_bytes
    assert measured.write_bytes == pytest.approx(plan.nvme_write_bytes, rel=0.03)


def test_a_budget_that_sums_do_not_fit_into_spills_them(nvme: Path) -> None:
    """The planner spills what has no room; the ledger never holds more than the budget, nor gradients more than planned."""
    free = Placement()
    config = horizontal(nvme, tile_bytes="64KiB", tile_slots=2, weight_slots=2, check=False, cpu_memory="1200KiB")
    options = {"activation_bytes": 100 << 10, "placement": free}
    with open_engine(WIDE_BULK.build(), config, **options) as engine:
        plan = engine.plan
        reserved = peaks_of(engine.memory_report())
        assert sum(reserved.values()) <= plan.memory_bytes(Tier.CPU) <= 1200 << 10
        run = train_engine(engine, WIDE_BULK, config, range(2))
    assert {unit.grads for unit in plan.units} == {Tier.CPU, Tier.NVME}
    assert plan.gradient_slot_bytes == 4 * WIDTH * WIDTH  # one unit's sums
    assert run.counters["gradient_spill_bytes"] > 0
    peaks = peaks_of(run.memory)
    for owner in (Owner.GRADIENTS, Owner.GRADIENT_SLOTS, Owner.ACCUMULATORS):
        assert peaks.get(owner.value, 0) <= plan.owner_bytes(owner), owner
    assert sum(num_bytes for owner, num_bytes in peaks.items() if owner != "activations") <= 1200 << 10  # those are measured
    require_same(run, train(WIDE_BULK, settings(nvme, num_micro_batches=A, check=False), num_steps=2))


def test_sums_in_ram_are_booked_once_as_planned(nvme: Path) -> None:
    """With room for them the ledger's gradients are exactly the plan's: the finished one takes its sum's place."""
    config = horizontal(nvme)
    with open_engine(TINY_GPT.build(), config) as engine:
        run, plan = train_engine(engine, TINY_GPT, config, range(2)), engine.plan
    peaks = peaks_of(run.memory)
    assert {unit.grads for unit in plan.units} == {Tier.CPU}
    assert peaks["gradients"] == plan.owner_bytes(Owner.GRADIENTS)
    assert peaks.get("gradient accumulators", 0) == 0
    assert run.counters.get("gradient_spill_bytes", 0) == 0


def tensor_bytes() -> int:
    """Return the bytes of all storages that tensors hold now, each once."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_between_micro_batches_no_sum_is_in_tensors(nvme: Path) -> None:
    """After a backward that is not the last, no more than one unit's gradient is held; the whole model's would be 12."""
    config = horizontal(nvme, optim="nvme", params="nvme", check=False)
    with open_engine(WIDE_BULK.build(), config, placement=all_spilled(config)) as engine:
        micro_batches = WIDE_BULK.batches(0, A, torch.bfloat16)
        held = []
        for micro_batch in micro_batches:
            held.append(tensor_bytes())
            loss = engine(*micro_batch)
            engine.backward(loss)
            del loss
            engine.step()
    assert max(held[1:]) - held[0] <= engine.plan.owner_bytes(Owner.ACCUMULATORS)


# What the plan does not know of


def test_a_unit_called_twice_books_its_second_sum(nvme: Path) -> None:
    """Units are planned with one sum a name; that of the second call is asked from the ledger and then kept."""
    config = horizontal(nvme, optim="nvme", params="nvme")
    run = train(SHARED_LAYER, config, placement=all_spilled(config))
    block_bytes = 4 * sum(value.numel() for name, value in run.state.items() if name.startswith("blocks.0."))
    booked = peaks_of(run.memory)["gradient accumulators"]
    assert block_bytes <= booked <= block_bytes + 12 * 64 * 4 + 4096


def test_the_familiar_loop_under_a_vertical_plan_books_its_sums(nvme: Path) -> None:
    """The plan has no room for sums then: they are asked from the ledger, one time for all steps."""
    config = settings(nvme, num_micro_batches=A, check=False)
    with open_engine(WIDE_BULK.build(), config) as engine:
        for step in range(2):
            for micro_batch in WIDE_BULK.batches(step, A, torch.bfloat16):
                engine.backward(engine(*micro_batch))
                engine.step()
        state, memory = engine.state_dict(), engine.memory_report()
    assert peaks_of(memory)["gradient accumulators"] == 4 * NUM_PARAMETERS
    require_same_state(state, train(WIDE_BULK, config, num_steps=2).state)


def test_sums_without_room_are_refused_with_the_way_out(nvme: Path) -> None:
    """Under a budget for vertical order alone the familiar loop stops at OverBudget that names the schedule, and closes."""
    config = settings(
        nvme, num_micro_batches=A, optim="nvme", params="nvme", check=False, tile_bytes="64KiB", tile_slots=2,
        weight_slots=2, cpu_memory="1200KiB",
    )  # fmt: skip
    engine = open_engine(WIDE_BULK.build(), config, activation_bytes=100 << 10)
    with engine:
        loss = engine(*WIDE_BULK.batches(0, 1, torch.bfloat16)[0])
        with pytest.raises(OverBudget, match=r"sum of layers.*infinity\.schedule to \"horizontal\""):
            engine.backward(loss)
        assert engine.state is EngineState.FAILED
    assert engine.ledger.used(Tier.CPU) == sum(
        line.used_bytes for line in engine.memory_report() if line.owner == "activations"
    )


# Failures


def test_a_step_that_failed_leaves_no_sum_behind(nvme: Path) -> None:
    """An error in the second micro-batch: the step is forgotten, and what follows has the bits of a run without it."""
    config = horizontal(nvme, optim="nvme", params="nvme")
    with open_engine(TINY_GPT.build(), config, placement=all_spilled(config)) as engine:
        engine.train_batch(TINY_GPT.batches(0, A, torch.bfloat16))
        with pytest.raises(TypeError):
            engine.train_batch([TINY_GPT.batches(7, 1, torch.bfloat16)[0], ("tokens", "targets"), ("never", "reached")])
        engine.train_batch(TINY_GPT.batches(1, A, torch.bfloat16))
        state = engine.state_dict()
    require_same_state(state, train(TINY_GPT, settings(nvme, num_micro_batches=A), num_steps=2).state)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=lambda op: op.name)
def test_a_disk_error_of_a_sum_is_raised_and_everything_is_given_back(
    op: Op, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is lost, so the step is: a StorageError leaves the engine FAILED, and close leaves neither file nor memory."""
    num_bytes = 4 * WIDTH * WIDTH  # nothing else is as large: tiles are smaller, finished gradients half of it
    real = directories.open_engine
    fault = Fault(FaultKind.ERROR, lambda request: request.op is op and request.length == num_bytes)
    monkeypatch.setattr(directories, "open_engine", lambda *args, **kwargs: FaultyEngine(real(*args, **kwargs), [fault]))
    config = horizontal(nvme, optim="nvme", params="nvme", check=False)
    with open_engine(WIDE_BULK.build(), config, placement=all_spilled(config)) as engine:
        with pytest.raises(StorageError, match="Input/output error"):
            engine.train_batch(WIDE_BULK.batches(0, A, torch.bfloat16))
        assert engine.state is EngineState.FAILED
    assert list(nvme.iterdir()) == []
    used = {line.owner: line.used_bytes for line in engine.memory_report()}
    assert {owner for owner, left in used.items() if left} <= {"activations"}
