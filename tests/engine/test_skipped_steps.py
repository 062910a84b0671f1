"""A gradient that is not finite skips the step: said, counted, and nothing touched on any tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import Kit, MicroBatch, compute_dtype, open_engine, require_same_state, settings
from torch import nn

from infinity.checkpoint.reader import open_checkpoint

WIDTH = 40


class Poisoned(nn.Module):
    """Four layers; the given factor reaches the gradient of a single weight element of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            y = layer(x)
            if number == 2:
                mask = torch.zeros_like(y)
                mask[0, 5] = 1
                y = y + (_Scaled.apply(y, factor) - y) * mask
            x = torch.tanh(y)
        return x.float().square().mean()


class _Scaled(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx, y, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return torch.where(gradient != 0, gradient * ctx.factor, gradient), None


def clean(generator: torch.Generator, step: int) -> MicroBatch:
    return torch.randn(3, WIDTH, generator=generator), torch.tensor(1.0)


KIT = Kit("poisoned", Poisoned, clean)
SCHEDULER = {"type": "linear", "params": {"warmup_num_steps": 3, "total_num_steps": 20}}


def poisoned(batches: list[MicroBatch], factor: float) -> list[MicroBatch]:
    """Return the micro-batches with the factor in the last of them."""
    return [*batches[:-1], (batches[-1][0], torch.tensor(factor))]


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [("vertical", float("inf")), ("vertical", float("nan")), ("horizontal", float("-inf"))],
)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")], ids="-".join)
def test_a_step_with_a_bad_gradient_touches_nothing(
    tiers: tuple[str, str], bf16: bool, schedule: str, factor: float, nvme: Path
) -> None:
    """C77: one element of one gradient is not finite in the fourth step: no state moves, the step is reported and counted.

    Learning rate and step counts do not advance (C83); the steps after it are those of a run in which it never was.
    """
    config = settings(
        nvme,
        optim=tiers[0],
        params=tiers[1],
        bf16=bf16,
        num_micro_batches=2,
        schedule=schedule,
        scheduler=SCHEDULER,
        lr=1e-3,
    )
    dtype = compute_dtype(config)
    with open_engine(KIT.build(), config) as engine:
        for step in range(3):
            assert not engine.train_batch(KIT.batches(step, 2, dtype)).skipped
        before, lr, steps = engine.state_dict(), engine.lr, dict(engine.optimizer.steps)
        result = engine.train_batch(poisoned(KIT.batches(3, 2, dtype), factor))
        assert result.skipped
        assert not torch.tensor(result.grad_norm).isfinite()
        assert engine.skipped_steps == 1
        assert engine.global_steps == 4
        assert engine.lr == lr
        assert dict(engine.optimizer.steps) == steps
        require_same_state(engine.state_dict(), before)
        losses = [engine.train_batch(KIT.batches(step, 2, dtype)).losses for step in range(4, 6)]
        state = engine.state_dict()
    with open_engine(KIT.build(), config) as engine:
        for step in range(3):
            engine.train_batch(KIT.batches(step, 2, dtype))
        assert [engine.train_batch(KIT.batches(step, 2, dtype)).losses for step in range(4, 6)] == losses
        require_same_state(engine.state_dict(), state)


def test_moments_on_disk_are_untouched_too(nvme: Path, tmp_path: Path) -> None:
    """C77: weights, low halves and both moments on NVMe have the bits of before; no partial set of tiles is written."""
    config = settings(nvme, optim="nvme", params="nvme", tile_bytes=640)
    with open_engine(KIT.build(), config) as engine:
        for step in range(2):
            engine.train_batch(KIT.batches(step, 1, torch.bfloat16))
        engine.synchronize()
        before = engine.save_checkpoint(tmp_path / "before")
        written = engine.recorder.counters()["nvme_write_bytes"]
        assert engine.train_batch(poisoned(KIT.batches(2, 1, torch.bfloat16), float("inf"))).skipped
        engine.synchronize()
        assert engine.recorder.counters()["nvme_write_bytes"] == written
        after = engine.save_checkpoint(tmp_path / "after")
    for kind in ("weight", "master_low", "exp_avg", "exp_avg_sq"):
        with open_checkpoint(before) as first, open_checkpoint(after) as second:
            specs = dict(first.specs(kind))
            assert len(specs) == 8
            for name, spec in specs.items():
                values = [torch.empty(spec.numel, dtype=getattr(torch, spec.dtype)) for _ in range(2)]
                first.read(name, kind, 0, spec.numel, values[0])
                second.read(name, kind, 0, spec.numel, values[1])
                assert torch.equal(*values), (kind, name)


def test_familiar_loop_skips_too(nvme: Path) -> None:
    """The loop that users know sees the skip in the counters, and goes on."""
    config = settings(nvme, optim="nvme", params="nvme")
    with open_engine(KIT.build(), config) as engine:
        for factor in (1.0, float("nan"), 1.0):
            for batch in poisoned(KIT.batches(0, 1, torch.bfloat16), factor):
                engine.backward(engine(*batch))
                engine.step()
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        assert all(value.isfinite().all() for value in engine.state_dict().values())
        assert set(engine.optimizer.steps.values()) == {2}


def test_first_steps_skipped_do_not_use_up_the_warm_up(nvme: Path) -> None:
    """C83: with the first three steps skipped, the learning rate is readable before them and starts at 0 after them."""
    config = settings(nvme, optim="nvme", params="nvme", scheduler=SCHEDULER, lr=0.3)
    with open_engine(KIT.build(), config) as engine:
        assert engine.lr == 0.0
        for _ in range(3):
            assert engine.train_batch(poisoned(KIT.batches(0, 1, torch.bfloat16), float("nan"))).skipped
        used = [engine.train_batch(KIT.batches(0, 1, torch.bfloat16)).lr for _ in range(4)]
    assert used == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("value", [3.0e38, -3.0e38])
def test_large_but_finite_gradients_are_not_skipped(value: float, nvme: Path) -> None:
    """A gradient whose square overflows fp32 is finite all the same: clipped and applied, not skipped."""
    config = settings(nvme, optim="nvme", params="nvme", bf16=False)
    model = nn.Sequential(nn.Linear(4, 4))
    with open_engine(model, config) as engine:
        result = engine.train_batch([torch.full((1, 4), value)], loss_fn=lambda output, _: (output * 0.5).sum())
        state = engine.state_dict()
    assert not result.skipped
    assert 1e38 < result.grad_norm < float("inf")
    assert all(tensor.isfinite().all() for tensor in state.values())
