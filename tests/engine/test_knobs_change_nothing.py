"""Sizes, counts, engines and instruction sets are about speed and memory: no bit of the results depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kit import BULK, DROPOUT_GPT, TINY_GPT, Kit, Run, require_same, settings, train

from infinity.aio.select import probe
from infinity.comm.launched import ONE_RANK
from infinity.config import Config
from infinity.engine.cut import cut
from infinity.engine.planned import ActivationSizes, plan_for
from infinity.errors import DoesNotFit
from infinity.memory.device import host_device
from infinity.optim.kernel import kernel_names
from infinity.placement import Placement, Plan
from infinity.states import Tier

NVME = {"optim": "nvme", "params": "nvme"}
ACTIVATION_BYTES = 1 << 18
_REFERENCES: dict[tuple[str, bool], Run] = {}


def reference(kit: Kit, nvme: Path, *, bf16: bool = True) -> Run:
    if (kit.name, bf16) not in _REFERENCES:
        _REFERENCES[kit.name, bf16] = train(kit, settings(nvme, bf16=bf16, num_micro_batches=4))
    return _REFERENCES[kit.name, bf16]


KNOBS: dict[str, dict[str, Any]] = {
    "tiles of one page": {"tile_bytes": "4KiB"},
    "tiles of 64 elements": {"tile_bytes": 640},
    "tiles of an odd size": {"tile_bytes": 50_000},
    "one tile a unit": {"tile_bytes": "8MiB"},
    "two tile slots": {"tile_slots": 2},
    "two weight slots": {"weight_slots": 2},
    "two of both": {"tile_slots": 2, "weight_slots": 2, "tile_bytes": "4KiB"},
    "many slots": {"tile_slots": 16, "weight_slots": 8},
    "bursts": {"io_policy": "burst"},
    "bursts through two slots": {"io_policy": "burst", "tile_slots": 2, "weight_slots": 2},
    "threads": {"engine": "threads"},
    "the page cache": {"engine": "buffered"},
    "unchecked": {"check": False},
    "recomputation": {"recompute": True},
    "horizontal with two slots": {"schedule": "horizontal", "tile_slots": 2, "weight_slots": 2},
    "horizontal in bursts": {"schedule": "horizontal", "io_policy": "burst"},
}


@pytest.mark.parametrize(
    ("kit", "knob"),
    [(DROPOUT_GPT, knob) for knob in KNOBS] + [(BULK, knob) for knob in KNOBS if "slots" in knob or "burst" in knob],
    ids=lambda value: value.name if isinstance(value, Kit) else value,
)
def test_knob_changes_nothing(kit: Kit, knob: str, nvme: Path) -> None:
    """With everything on NVMe, tile sizes, slots, policies and engines leave every bit as it is."""
    require_same(train(kit, settings(nvme, num_micro_batches=4, **{**NVME, **KNOBS[knob]})), reference(kit, nvme))


def test_uring_changes_nothing(nvme: Path) -> None:
    """The io_uring engine, where this kernel lets us have it, gives the bits of the run in RAM."""
    if probe(nvme).engine != "uring":
        pytest.skip("io_uring is not to be had here")
    require_same(
        train(DROPOUT_GPT, settings(nvme, num_micro_batches=4, engine="uring", **NVME)), reference(DROPOUT_GPT, nvme)
    )


@pytest.mark.parametrize("aio", [{"block_size": 4096, "queue_depth": 1}, {"block_size": 65536, "queue_depth": 3}], ids=str)
def test_request_size_changes_nothing(aio: Mapping[str, int], nvme: Path) -> None:
    """Requests are cut and queued in any way."""
    config = {**settings(nvme, num_micro_batches=4, **NVME), "aio": aio}
    require_same(train(TINY_GPT, config), reference(TINY_GPT, nvme))


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", kernel_names())
def test_instruction_set_changes_nothing(name: str, bf16: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Adam kernel that this CPU can run gives the same bits as the fastest."""
    expected = reference(TINY_GPT, nvme, bf16=bf16)
    monkeypatch.setenv("INFINITY_CPU_ADAM", name)
    require_same(train(TINY_GPT, settings(nvme, bf16=bf16, num_micro_batches=4, **NVME)), expected)


@pytest.mark.parametrize("num_threads", [1, 64])
def test_adam_threads_change_nothing(num_threads: int, nvme: Path) -> None:
    """One Adam thread, or as many as there are cores."""
    expected = reference(BULK, nvme)
    require_same(train(BULK, settings(nvme, num_micro_batches=4, adam_threads=num_threads, **NVME)), expected)


def plan_within(kit: Kit, config: Mapping[str, Any], cpu_memory: int) -> Plan | None:
    resolved = Config.from_any({**config, "infinity": {**config["infinity"], "cpu_memory": cpu_memory}})
    pieces = cut(kit.build(), resolved, lambda _: 0, stage=0, ranks=ONE_RANK)
    try:
        return plan_for(pieces, resolved, Placement.from_config(resolved), host_device(), ActivationSizes(ACTIVATION_BYTES))
    except DoesNotFit:
        return None


def smallest_budget(kit: Kit, config: Mapping[str, Any]) -> int:
    """Return the smallest budget that has a plan."""
    too_small, enough = 0, 1 << 29
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if plan_within(kit, config, middle) is None:
            too_small = middle
        else:
            enough = middle
    return enough


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_budget_changes_nothing(bf16: bool, schedule: str, nvme: Path) -> None:
    """From the smallest budget that has a plan, where even gradients spill, to one that holds all: one set of bits.

    No budget is exceeded, and more of it means fewer NVMe bytes.
    """
    config = settings(nvme, bf16=bf16, num_micro_batches=4, optim="auto", params="auto", schedule=schedule)
    smallest = smallest_budget(BULK, config)
    whole = plan_within(BULK, config, 1 << 29)
    assert whole is not None
    largest = whole.memory_bytes(Tier.CPU)
    moved = []
    for share in (0.0, 0.2, 0.6, 1.0):
        budget = int(smallest + share * (largest - smallest))
        asked = {**config, "infinity": {**config["infinity"], "cpu_memory": budget}}
        run = train(BULK, asked, activation_bytes=ACTIVATION_BYTES)
        require_same(run, reference(BULK, nvme, bf16=bf16))
        allocated = sum(line.peak_bytes for line in run.memory if line.tier is Tier.CPU and line.owner != "activations")
        assert allocated + ACTIVATION_BYTES <= budget
        moved.append(run.results[-1].nvme_read_bytes + run.results[-1].nvme_write_bytes)
        if share == 0.0:
            assert run.counters["gradient_spill_bytes"] > 0
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > 0
    assert moved[-1] == 0
