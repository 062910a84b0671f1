"""What a step reads and writes goes through registered files and buffers, from the first byte to the close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit import TINY_GPT, open_engine, settings, train_engine

from infinity.aio.direct import TEMPORARY_PREFIX
from infinity.aio.request import Request
from infinity.aio.uring import UringEngine
from infinity.config import Config
from infinity.handles import Handle
from infinity.placement import Placement

Submit = Callable[[UringEngine, Sequence[Request]], list[Handle[None]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[UringEngine], list[str]]:
    """Collect the rings that are used, and a line for each request that is not wholly on what is registered."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    rings: list[UringEngine] = []
    plain: list[str] = []
    real: Submit = UringEngine.submit

    def submit(ring: UringEngine, requests: Sequence[Request]) -> list[Handle[None]]:
        known = ring._registration
        if all(one.file.path.name.startswith(TEMPORARY_PREFIX) for one in requests):  # a probe's ring
            return real(ring, requests)
        if ring not in rings:
            rings.append(ring)
        for one in requests:
            inside = any(
                given.address <= one.address and one.address + one.length <= given.address + given.num_bytes
                for given in known._memory
            )
            if one.file not in known.tickets or not inside:
                plain.append(f"{one.op} of {one.length} bytes in {one.file.path}")
        return real(ring, requests)

    monkeypatch.setattr(UringEngine, "submit", submit)
    return rings, plain


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_every_byte_of_a_step_is_registered(schedule: str, seen: tuple[list[UringEngine], list[str]], nvme: Path) -> None:
    """With weights, optimizer state and gradients on NVMe no request is plain, and the close takes all of it back."""
    rings, plain = seen
    config: dict[str, Any] = settings(
        nvme, optim="nvme", params="nvme", num_micro_batches=2, schedule=schedule, engine="uring"
    )
    placement = Placement.from_config(Config.from_any(config)).override("*", grads="nvme")
    with open_engine(TINY_GPT.build(), config, placement=placement) as engine:
        assert engine.io.registered_files
        assert engine.io.registered_buffers
        assert engine.io.engine == "uring"
        assert not [note for note in engine.notes if "registered" in note]
        train_engine(engine, TINY_GPT, config, range(2))
    assert plain == []
    [ring] = rings
    assert not ring._registration._files
    assert not ring._registration._memory


def test_nothing_is_registered_without_nvme(seen: tuple[list[UringEngine], list[str]], nvme: Path) -> None:
    """Where everything stays in memory there is no ring and nothing to register."""
    config = settings(nvme)
    with open_engine(TINY_GPT.build(), config) as engine:
        assert not engine.io.registered_files
        assert not engine.io.registered_buffers
        train_engine(engine, TINY_GPT, config, range(1))
    assert seen == ([], [])
