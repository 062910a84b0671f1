"""Step k uses schedule(k), as torch's schedulers do it."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.optim.schedules import build_schedule

PEAK, NUM_STEPS, NUM_WARMUP = 0.3, 40, 10


def torch_rates(make_scheduler, lr: float = PEAK) -> list[float]:  # type: ignore[no-untyped-def]
    """The learning rate in force at each step of a torch optimizer with this scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(kind: str, num_warmup_steps: int) -> list[float]:
    schedule = build_schedule(kind, peak_lr=PEAK, num_steps=NUM_STEPS, num_warmup_steps=num_warmup_steps)
    return [schedule(step) for step in range(NUM_STEPS)]


def test_warmup_starts_at_zero_and_reaches_the_peak() -> None:
    """Steps 0 to 3 of a warm-up over 10 use 0, 1, 2 and 3 tenths, as torch's LambdaLR (C80)."""
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / NUM_WARMUP))
    )
    got = rates("constant", NUM_WARMUP)
    assert got == pytest.approx(expected, rel=1e-15)
    assert got[:4] == pytest.approx([0.0, 0.03, 0.06, 0.09])
    assert got[NUM_WARMUP] == PEAK


def test_linear_and_cosine_are_those_of_torch() -> None:
    """Without warm-up they equal LinearLR to 0 and CosineAnnealingLR at every step (C80)."""
    linear = torch_rates(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=NUM_STEPS))
    cosine = torch_rates(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS))
    assert rates("linear", 0) == pytest.approx(linear, rel=1e-9)
    assert rates("cosine", 0) == pytest.approx(cosine, rel=1e-9)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_begins_after_the_warmup_and_ends_at_zero(kind: str) -> None:
    """The peak is at the first step after the warm-up, the last step is above 0, later ones stay at 0."""
    schedule = build_schedule(kind, peak_lr=PEAK, num_steps=NUM_STEPS, num_warmup_steps=NUM_WARMUP)
    assert schedule(NUM_WARMUP) == PEAK
    assert 0 < schedule(NUM_STEPS - 1) < PEAK / 20
    assert schedule(NUM_STEPS) == schedule(10 * NUM_STEPS) == 0


def test_bad_schedules_are_refused() -> None:
    """An unknown kind and a warm-up that is longer than the training are named."""
    with pytest.raises(ConfigError, match=r"'step'.*cosine"):
        build_schedule("step", peak_lr=PEAK, num_steps=10)
    with pytest.raises(ConfigError, match=r"11.*10"):
        build_schedule("linear", peak_lr=PEAK, num_steps=10, num_warmup_steps=11)
