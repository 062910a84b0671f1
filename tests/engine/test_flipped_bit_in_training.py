"""A bit that changes on disk between two steps ends training with an error that says where; checksums change no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import BULK, DROPOUT_GPT, compute_dtype, open_engine, require_same, settings, train

import infinity.engine.build as build
from infinity.errors import IllegalTransition, SwapCorruptionError
from infinity.store.store import Store

NVME = {"optim": "nvme", "params": "nvme"}


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The stores that engines open."""
    opened: list[Store] = []
    real = build.open_store

    def remember(**options: object) -> Store:
        opened.append(real(**options))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(build, "open_store", remember)
    return opened


@pytest.mark.parametrize("what", ["tile", "weights"])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_flipped_bit_between_steps_ends_training(nvme: Path, stores: list[Store], what: str, schedule: str) -> None:
    """The step that would use it raises an error with file, offset and tile; the engine takes no more steps."""
    config = settings(nvme, schedule=schedule, weight_slots=2, **NVME)

    def step() -> None:
        engine.train_batch(BULK.batches(0, 1, compute_dtype(config)))
        engine.synchronize()

    with open_engine(BULK.build(), config) as engine:
        step()
        described: Any = stores[0].describe()["shards"]
        shard = described[12]  # in no slot at this moment
        where = shard["tiles"][-1] if what == "tile" else shard["weights"]
        flip(stores[0].directories[0] / where["file"], where["offset"] + where["length"] // 3)
        name = f"tile {len(shard['tiles']) - 1}" if what == "tile" else "weights"
        words = f"{name} of {shard['name']}, {where['length']} bytes at offset {where['offset']}, is not what was written"
        with pytest.raises(SwapCorruptionError, match=rf"swap\.bin: {words}") as caught:
            step()
        assert caught.value.exit_code == 12
        with pytest.raises(IllegalTransition):
            step()
    assert list(nvme.iterdir()) == []


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_checksums_change_nothing_and_cost_nothing_when_off(
    nvme: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without them a run has the same bits and moves the same bytes; without, none is ever computed."""
    config = settings(nvme, num_micro_batches=2, schedule=schedule, **NVME)
    checked = train(DROPOUT_GPT, config)
    monkeypatch.setattr(build, "open_checksums", None)  # not even opened
    plain = train(DROPOUT_GPT, settings(nvme, num_micro_batches=2, schedule=schedule, checksums=False, **NVME))
    require_same(plain, checked)
    for name in ("nvme_read_bytes", "nvme_write_bytes", "gradient_spill_bytes"):
        assert plain.counters.get(name) == checked.counters.get(name)
