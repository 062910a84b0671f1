"""An overflow skips the step and moves the loss scale; what cannot be helped stops the run with an explanation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same_state, settings
from test_skipped_steps import KIT, SCHEDULER, poisoned

import infinity
from infinity.checkpoint.manifest import read_manifest
from infinity.engine import Engine, EngineState
from infinity.errors import CheckpointError, Diverged

NVME = {"optim": "nvme", "params": "nvme"}


def batches(factor: float = 1.0) -> list[Any]:
    return poisoned(KIT.batches(0, 2, torch.float16), factor)


def scales(engine: Engine, factors: list[float]) -> list[float]:
    """Return the scale after each step."""
    found = []
    for factor in factors:
        engine.train_batch(batches(factor))
        found.append(engine.loss_scale)
    return found


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_an_overflow_is_recovered_from(tiers: tuple[str, str], nvme: Path) -> None:
    """C77, C83: steps are skipped until the scale fits; then training is that of a run which began with the scale found.

    Neither learning rate nor step counts advance meanwhile, the first offending parameter is named, and more skips in a row
    than `infinity.max_skipped_in_a_row` do not stop a search that goes on.
    """
    fp16 = {"initial_scale_power": 40, "hysteresis": 1, "loss_scale_window": 1000}
    common = {
        "optim": tiers[0], "params": tiers[1], "num_micro_batches": 2, "scheduler": SCHEDULER, "max_skipped_in_a_row": 3,
    }  # fmt: skip
    with open_engine(KIT.build(), settings(nvme, fp16=fp16, **common)) as engine:
        before = engine.state_dict()
        num_skipped = 0
        while (result := engine.train_batch(batches())).skipped:
            assert result.first_not_finite is not None
            assert result.loss_scale == 2.0 ** (40 - num_skipped)
            num_skipped += 1
            assert engine.loss_scale == 2.0 ** (40 - num_skipped)
            assert (engine.lr, engine.optimizer.steps) == (0.0, {})
            require_same_state(engine.state_dict(), before)
        assert 3 < num_skipped < 40
        assert engine.skipped_steps == num_skipped
        losses = [result.losses, *(engine.train_batch(batches()).losses for _ in range(4))]
        state = engine.state_dict()
    static = {"loss_scale": 2.0 ** (40 - num_skipped)}
    with open_engine(KIT.build(), settings(nvme, fp16=static, **common)) as engine:
        assert [engine.train_batch(batches()).losses for _ in range(5)] == losses
        require_same_state(engine.state_dict(), state)


def test_the_engine_follows_the_rules(nvme: Path) -> None:
    """Window and hysteresis act through the engine as the rules say; the familiar loop moves the scale alike."""
    nan, inf = float("nan"), float("inf")
    fp16 = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2}
    with open_engine(KIT.build(), settings(nvme, fp16=fp16, num_micro_batches=2, **NVME)) as engine:
        assert engine.loss_scale == 64
        assert scales(engine, [1.0, 1.0, nan, 1.0, inf, 1.0, 1.0]) == [64, 128, 128, 128, 64, 64, 128]
        for factor in (nan, nan):
            for batch in batches(factor):
                engine.backward(engine(*batch))
                engine.step()
        assert engine.loss_scale == 64
        assert (engine.global_steps, engine.skipped_steps) == (9, 4)


def test_an_overflow_at_the_minimum_stops(nvme: Path) -> None:
    """What is not finite at the lowest scale is no matter of scale: an error that says so; the engine can go on."""
    fp16 = {"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 2}
    with open_engine(KIT.build(), settings(nvme, fp16=fp16, num_micro_batches=2, **NVME)) as engine:
        engine.train_batch(batches())
        before = engine.state_dict()
        assert scales(engine, [float("nan")]) == [2]
        explained = r"loss scale is 2, the lowest that fp16\.min_loss_scale allows.*layers\.2\."
        with pytest.raises(Diverged, match=explained) as caught:
            engine.train_batch(batches(float("nan")))
        assert "65504" in caught.value.remedy
        assert engine.state is EngineState.READY
        require_same_state(engine.state_dict(), before)
        assert not engine.train_batch(batches()).skipped


def test_a_static_scale_is_bounded_by_skips_in_a_row(nvme: Path) -> None:
    """C78: nothing moves a static scale, so skips in a row are counted as in bf16; an applied step begins the count anew."""
    config = settings(nvme, fp16={"loss_scale": 96}, num_micro_batches=2, max_skipped_in_a_row=2, **NVME)
    nan = float("nan")
    with open_engine(KIT.build(), config) as engine:
        assert scales(engine, [nan, 1.0, nan]) == [96.0] * 3
        with pytest.raises(Diverged, match=r"2 steps in a row.*training in bf16 needs no loss scale"):
            engine.train_batch(batches(nan))


@pytest.mark.parametrize("fp16", [{}, {"loss_scale": 96}], ids=["dynamic", "static"])
def test_the_scale_is_in_the_checkpoint(fp16: dict[str, Any], nvme: Path, tmp_path: Path) -> None:
    """A dynamic scale is saved with what its rules count; a static one is the configuration's. Damage is refused."""
    with open_engine(KIT.build(), settings(nvme, fp16=fp16, num_micro_batches=2)) as engine:
        scales(engine, [1.0, float("nan")])
        path = engine.save_checkpoint(tmp_path)
        found = read_manifest(path).state
        assert found.precision == "fp16"
        dynamic = {"scale": 65536.0, "hysteresis_left": 1, "num_finite_steps": 0}
        assert found.loss_scale == (None if fp16 else dynamic)
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"hysteresis_left": 1', '"hysteresis_left": "x"'))
        if not fp16:
            with pytest.raises(CheckpointError, match="loss scale is damaged"):
                engine.load_checkpoint(path)


def test_a_loss_in_fp16_may_overflow_with_the_scale(nvme: Path) -> None:
    """65536 is no fp16 number: a loss of that dtype makes the first steps overflow instead of failing."""
    batch = TINY_GPT.batches(0, 1, torch.float16)

    def half(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output.half()

    with open_engine(TINY_GPT.build(), settings(nvme, fp16={"hysteresis": 1})) as engine:
        skipped = [engine.train_batch(batch, loss_fn=half).skipped for _ in range(3)]
    assert skipped[0]
    assert not skipped[2]


def test_gradients_are_seen_unscaled(nvme: Path) -> None:
    """What users read and set of a waiting gradient is that of the loss itself, whatever the scale is."""
    found = {}
    for scale in (1, 256):
        with open_engine(KIT.build(), settings(nvme, fp16={"loss_scale": scale}, num_micro_batches=1, clip=0.0)) as engine:
            weight = engine.module.get_parameter("layers.1.weight")
            engine.backward(engine(*KIT.batches(0, 1, torch.float16)[0]))
            gradient = infinity.utils.safe_get_full_grad(weight)
            assert gradient is not None
            found[scale] = gradient.clone()
            for parameter in engine.module.parameters():
                infinity.utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape))
            infinity.utils.safe_set_full_grad(weight, torch.full(weight.shape, 0.5))
            engine.step()
            assert engine.get_global_grad_norm() == 0.5 * weight.numel() ** 0.5
    torch.testing.assert_close(found[256], found[1], rtol=1e-3, atol=1e-7)
    assert found[1].abs().max() > 0
