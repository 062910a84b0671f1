"""On a device with memory of its own: the bits of a run on the CPU, whenever its copies end, and every byte booked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BULK,
    DROPOUT_GPT,
    LORA_GPT,
    ODD_MLP,
    TINY_GPT,
    Kit,
    Run,
    kit_of,
    open_engine,
    require_same,
    require_same_state,
    settings,
    train,
    train_engine,
    train_familiarly,
)
from separate_device import FakeMemory, FakeTransfers, install
from torch import nn

from infinity.byte_sizes import KIB, MIB
from infinity.config import Config
from infinity.engine.activations import open_activation_meter
from infinity.engine.take_over import move_buffers
from infinity.errors import OverBudget
from infinity.memory.device import ComputeDevice, device_bytes
from infinity.memory.ledger import Ledger
from infinity.memory.transfer import HostTransfers
from infinity.placement import Owner, Placement
from infinity.states import Tier

PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the gpu": {"optim": "gpu", "params": "gpu"},
    "optimizer in ram": {"optim": "cpu", "params": "gpu"},
    "optimizer on nvme": {"optim": "nvme", "params": "gpu"},
    "weights in ram": {"optim": "cpu", "params": "cpu"},
    "weights in ram, optimizer on nvme": {"optim": "nvme", "params": "cpu"},
    "weights on nvme": {"optim": "cpu", "params": "nvme"},
    "all on nvme": {"optim": "nvme", "params": "nvme"},
}
_REFERENCES: dict[tuple[str, bool, int, bool], Run] = {}


def reference(kit: Kit, nvme: Path, *, bf16: bool = True, num_micro_batches: int = 2, familiar: bool = False) -> Run:
    """Return the run where the CPU is the compute device."""
    key = (kit.name, bf16, num_micro_batches, familiar)
    if key not in _REFERENCES:
        run = train_familiarly if familiar else train
        _REFERENCES[key] = run(kit, settings(nvme, bf16=bf16, num_micro_batches=num_micro_batches))
    return _REFERENCES[key]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> FakeTransfers:
    """A device whose copies end as late as they may."""
    return install(monkeypatch, late=True)


@pytest.mark.parametrize("end", ["late", "early"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", [TINY_GPT.name, BULK.name])
def test_a_separate_device_changes_no_bit(
    name: str, placement: str, end: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever states live and whenever copies end, no copy meets a buffer in use, and every bit is the CPU's."""
    kit = kit_of(name)
    expected = reference(kit, nvme)
    transfers = install(monkeypatch, late=end == "late")
    require_same(train(kit, settings(nvme, num_micro_batches=2, **PLACEMENTS[placement])), expected)
    assert transfers.queues["in"]
    assert transfers.queues["out"]


@pytest.mark.parametrize("end", ["late", "early"])
@pytest.mark.parametrize("placement", ["all on the gpu", "weights in ram"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_an_optimizer_of_torch_changes_no_bit_there(
    bf16: bool, placement: str, end: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masters stay in RAM and the weights go to the device again after every update."""
    momentum = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
    expected = train(ODD_MLP, settings(nvme, bf16=bf16, num_micro_batches=2) | momentum)
    install(monkeypatch, late=end == "late")
    there = settings(nvme, bf16=bf16, num_micro_batches=2, **PLACEMENTS[placement]) | momentum
    require_same(train(ODD_MLP, there), expected)


@pytest.mark.parametrize("placement", ["optimizer in ram", "weights in ram", "all on nvme"])
@pytest.mark.parametrize("name", [ODD_MLP.name, DROPOUT_GPT.name, LORA_GPT.name])
def test_every_model_computes_the_same_there(name: str, placement: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, dropout and frozen weights, in fp32."""
    kit = kit_of(name)
    expected = reference(kit, nvme, bf16=False)
    install(monkeypatch, late=True)
    require_same(train(kit, settings(nvme, bf16=False, num_micro_batches=2, **PLACEMENTS[placement])), expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_familiar_loop_computes_the_same_there(placement: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """forward, backward, step in horizontal order."""
    expected = reference(TINY_GPT, nvme, familiar=True)
    install(monkeypatch, late=True)
    require_same(train_familiarly(TINY_GPT, settings(nvme, num_micro_batches=2, **PLACEMENTS[placement])), expected)


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_what_the_user_writes_on_the_device_is_the_master(bf16: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is written there between steps reaches the copy in RAM that is updated: the bits are the CPU's."""
    states = []
    for is_separate in (False, True):
        if is_separate:
            install(monkeypatch, late=True)
        with open_engine(TINY_GPT.build(), settings(nvme, bf16=bf16, **PLACEMENTS["optimizer in ram"])) as engine:
            batches = TINY_GPT.batches(0, 1, torch.bfloat16 if bf16 else torch.float32)
            engine.train_batch(batches)
            with torch.no_grad():
                engine.module.get_parameter("blocks.0.up.weight")[::2] = 0.0
            engine.train_batch(batches)
            states.append(engine.state_dict())
    require_same_state(states[1], states[0])


def test_spilled_gradients_leave_the_device_through_one_slot(late: FakeTransfers, nvme: Path) -> None:
    """Gradients forced to NVMe: the same bits, and they were spilled."""
    config = settings(nvme, num_micro_batches=2, optim="nvme", params="nvme")
    placement = Placement.from_config(Config.from_any(config)).override("*", grads="nvme")
    run = train(BULK, config, placement=placement)
    assert run.counters["gradient_spill_bytes"] > 0
    run_in_ram = train(BULK, config)
    require_same(run, run_in_ram)


def test_copies_run_beside_the_computation(late: FakeTransfers, nvme: Path) -> None:
    """Weights are on their way before their unit is asked for; a gradient is on its way while the next unit runs."""
    config = settings(nvme, num_micro_batches=2, **PLACEMENTS["weights in ram"])
    with open_engine(BULK.build(), config) as engine:
        train_engine(engine, BULK, config, range(2))
        late.log.clear()
        engine.train_batch(BULK.batches(2, 2, torch.bfloat16))
    visits = [place for place, entry in enumerate(late.log) if entry[0] == "acquire"]
    on_demand = [place for place in visits if late.log[place + 1][0] == "in"]
    num_uploads = sum(entry[0] == "in" for entry in late.log)
    assert num_uploads >= 24
    assert len(on_demand) <= num_uploads // 4
    out = [place for place, entry in enumerate(late.log) if entry[0] == "out"]
    waits = [next(p for p in range(o, len(late.log)) if late.log[p] == ("ended", *late.log[o][1:])) for o in out]
    beside = sum(any(entry[0] == "acquire" for entry in late.log[o:w]) for o, w in zip(out, waits, strict=True))
    assert beside >= len(out) - 2


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_byte_in_both_memories_is_booked_as_planned(placement: str, late: FakeTransfers, nvme: Path) -> None:
    """What the ledger's owners hold at most is what the plan says, in RAM and on the GPU, and all is given back."""
    config = settings(nvme, num_micro_batches=2, gpu_memory="32MiB", **PLACEMENTS[placement])
    with open_engine(BULK.build(), config) as engine:
        train_engine(engine, BULK, config, range(2))
        held = {(line.tier, line.owner): line.peak_bytes for line in engine.memory_report()}
        planned = {(line.tier, line.owner.value): line.num_bytes for line in engine.plan.memory}
        ledger = engine.ledger
    exact = (Owner.WEIGHTS, Owner.WEIGHT_SLOTS, Owner.GRADIENTS, Owner.GRADIENT_SLOTS, Owner.OPTIMIZER, Owner.TILE_SLOTS)
    for tier in (Tier.GPU, Tier.CPU):
        for owner in exact:
            assert held.get((tier, owner.value), 0) == planned.get((tier, owner.value), 0), (tier, owner)
    assert held[Tier.GPU, Owner.GRADIENT_SLOTS.value] > 0
    assert {line.owner for line in ledger.report() if line.used_bytes} <= {Owner.ACTIVATIONS.value}


def test_a_small_gpu_holds_some_weights_and_slots_for_the_others(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to the planner, weights in RAM go on to the GPU as far as it reaches; the bits stay."""
    expected = reference(BULK, nvme)
    install(monkeypatch, late=True, free_bytes=MIB + 200 * KIB)
    config = settings(nvme, num_micro_batches=2, optim="auto", params="auto")
    with open_engine(BULK.build(), config) as engine:
        assert {unit.params for unit in engine.plan.units} == {Tier.GPU, Tier.CPU}
        run = train_engine(engine, BULK, config, range(3))
    require_same(run, expected)


def test_resident_parameters_are_new_for_their_reader_at_every_moment(late: FakeTransfers, nvme: Path) -> None:
    """What the module holds on the device is the master's high half after initialize, after each step, after a load."""
    config = settings(nvme, bf16=False, **PLACEMENTS["optimizer in ram"])
    with open_engine(TINY_GPT.build(), config) as engine:

        def require_shown() -> None:
            shown = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
            require_same_state(shown, dict(engine.full_parameters()))

        require_shown()
        train_engine(engine, TINY_GPT, config, range(2))
        require_shown()
        saved = engine.save_checkpoint(nvme / "checkpoints")
        train_engine(engine, TINY_GPT, config, range(2, 3))
        require_shown()
        engine.load_checkpoint(saved)
        shown = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
        require_shown()
        require_same_state(shown, dict(engine.full_parameters()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_checkpoint_goes_on_bit_for_bit_there(placement: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved, trained on and loaded again, the same steps give the same bits, evaluation in between included."""
    expected = reference(TINY_GPT, nvme)
    install(monkeypatch, late=True)
    config = settings(nvme, num_micro_batches=2, **PLACEMENTS[placement])
    with open_engine(TINY_GPT.build(), config) as engine:
        train_engine(engine, TINY_GPT, config, range(1))
        saved = engine.save_checkpoint(nvme / "checkpoints")
        train_engine(engine, TINY_GPT, config, range(1, 3))
        engine.load_checkpoint(saved)
        engine.eval()
        with torch.no_grad():
            engine(*TINY_GPT.batches(7, 1, torch.bfloat16)[0])
        engine.train()
        require_same_state(train_engine(engine, TINY_GPT, config, range(1, 3)).state, expected.state)


def test_optimizer_state_asked_onto_the_gpu_is_said_to_stay_in_ram(late: FakeTransfers, nvme: Path) -> None:
    """Never silent: a note says so, and only where it was asked."""
    for placement, num_notes in (("all on the gpu", 1), ("optimizer in ram", 0)):
        with open_engine(TINY_GPT.build(), settings(nvme, **PLACEMENTS[placement])) as engine:
            assert sum("stay in RAM" in note for note in engine.notes) == num_notes


def test_buffers_move_to_the_device_and_shared_ones_stay_one() -> None:
    """Every buffer is where the model computes and booked once; what is no buffer stays."""
    model = nn.ModuleList([nn.BatchNorm1d(4), nn.Linear(2, 2)])
    model[1].register_buffer("also", model[0].running_mean)
    ledger = Ledger({})
    compute = ComputeDevice(torch.device("meta"), HostTransfers(), FakeMemory())
    with ExitStack() as resources, ExitStack() as undo:
        move_buffers(model, compute, ledger, resources, undo)
        assert all(buffer.is_meta for buffer in model.buffers())
        assert model[1].also is model[0].running_mean
        assert not model[1].weight.is_meta
        assert ledger.used(Tier.GPU) == 4 * 4 + 4 * 4 + 8
    assert ledger.used(Tier.GPU) == 0
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model[1].also is model[0].running_mean


def test_a_device_without_room_is_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own refusal names owner and bytes; the ledger forgets them with the resources."""

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    ledger, compute = Ledger({}), ComputeDevice(torch.device("cpu"), HostTransfers(), FakeMemory(free=MIB))
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OverBudget, match=r"refuses weights 2\.00 MiB .* 1\.00 MiB are free"), ExitStack() as resources:
        device_bytes(2 * MIB, compute=compute, ledger=ledger, owner="weights", resources=resources)
    assert ledger.used(Tier.GPU) == 0


def test_activations_on_a_device_are_what_its_peak_shows_above_the_booked_and_the_others() -> None:
    """The meter subtracts what the ledger knows and what was allocated before by others; it never falls."""
    ledger, memory = Ledger({}), FakeMemory(allocated=10 * MIB)
    ledger.take(Tier.GPU, "weights", 7 * MIB)
    compute = ComputeDevice(torch.device("cpu"), HostTransfers(), memory)
    meter = open_activation_meter(ledger, compute, host_base_bytes=0, planned_bytes=0)
    for peak, activations in ((15 * MIB, 5 * MIB), (12 * MIB, 5 * MIB), (16 * MIB, 6 * MIB)):
        memory.peak = peak
        meter.sample()
        meter.book()
        assert ledger.used(Tier.GPU) == 7 * MIB + activations
