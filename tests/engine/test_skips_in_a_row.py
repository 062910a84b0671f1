"""Steps that are skipped one after the other end in an error that says where to look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import Kit, open_engine, require_same_state, settings
from test_skipped_steps import KIT, poisoned

from infinity.engine import EngineState
from infinity.errors import Diverged

NVME = {"optim": "nvme", "params": "nvme"}


def batch(factor: float, kit: Kit = KIT) -> list[tuple[object, ...]]:
    return poisoned(kit.batches(0, 2, torch.bfloat16), factor)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_too_many_skips_in_a_row_stop(tiers: tuple[str, str], nvme: Path) -> None:
    """The third of three raises, names the parameter where backward met the first bad gradient, and touches nothing.

    The engine can go on: an applied step starts the count anew.
    """
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2, max_skipped_in_a_row=3)
    nan = float("nan")
    with open_engine(KIT.build(), config) as engine:
        engine.train_batch(batch(1.0))
        before = engine.state_dict()
        for _ in range(2):
            result = engine.train_batch(batch(nan))
            assert result.skipped
            assert result.first_not_finite is not None
            assert result.first_not_finite.startswith("layers.2.")
        with pytest.raises(Diverged, match=r"3 steps in a row.*layers\.2\.") as caught:
            engine.train_batch(batch(nan))
        assert "infinity.max_skipped_in_a_row" in caught.value.remedy
        assert engine.state is EngineState.READY
        assert (engine.global_steps, engine.skipped_steps) == (3, 2)
        require_same_state(engine.state_dict(), before)
        for factor in (nan, nan, 1.0, nan, nan):
            assert engine.train_batch(batch(factor)).skipped == (factor != 1.0)


def test_a_spilled_gradient_is_named_too(nvme: Path) -> None:
    """The familiar loop with gradients on NVMe raises from step(), with the name of the parameter."""
    from infinity.config import Config
    from infinity.placement import Placement

    config = settings(nvme, max_skipped_in_a_row=1, **NVME)
    placement = Placement.from_config(Config.from_any(config)).override("layers.*", grads="nvme")
    with open_engine(KIT.build(), config, placement=placement) as engine:
        engine.backward(engine(*batch(float("inf"))[-1]))
        with pytest.raises(Diverged, match=r"layers\.2\."):
            engine.step()
        assert engine.global_steps == 0
        engine.backward(engine(*batch(1.0)[-1]))
        engine.step()
        assert engine.global_steps == 1
