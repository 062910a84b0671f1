"""Micro-batches of different sizes: weighted by token counts, their step is that of the one big batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, VOCABULARY, open_engine, settings

from infinity.errors import ModelError

LENGTHS = (32, 5, 17, 1)


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randint(VOCABULARY, (1, length + 1), generator=generator) for length in LENGTHS]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def mean_over_tokens() -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients and norm of the mean over all tokens, in plain torch."""
    model = TINY_GPT.build()
    total = sum(length * model(*pair) for length, pair in zip(LENGTHS, sequences(), strict=True)) / sum(LENGTHS)
    total.backward()
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, norm


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_weights_give_the_mean_over_tokens(tiers: tuple[str, str], schedule: str, nvme: Path) -> None:
    """With token counts as weights, loss, norm and the update are those of the mean over all tokens, to rounding."""
    loss, gradients, norm = mean_over_tokens()
    config = settings(
        nvme, optim=tiers[0], params=tiers[1], bf16=False, num_micro_batches=4, schedule=schedule, clip=0.0, lr=1e-3,
        weight_decay=0.0,
    )  # fmt: skip
    initial = TINY_GPT.build().state_dict()
    with open_engine(TINY_GPT.build(), config) as engine:
        result = engine.train_batch(sequences(), weights=LENGTHS)
        state = engine.state_dict()
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        large = gradient.abs() > 1e-4 * gradient.abs().max()  # Adam's first step is lr times the sign
        moved = (state[name] - initial[name])[large]
        torch.testing.assert_close(moved, -1e-3 * gradient[large].sign(), rtol=1e-3, atol=1e-6)


def test_scaling_all_weights_changes_no_bit(nvme: Path) -> None:
    """Only proportions count: powers of two times the same weights give the same bits."""
    states = []
    for factor in (1, 8):
        config = settings(nvme, optim="nvme", params="nvme", num_micro_batches=4)
        with open_engine(TINY_GPT.build(), config) as engine:
            engine.train_batch(sequences(), weights=[length * factor for length in LENGTHS])
            states.append(engine.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_equal_weights_are_no_weights(nvme: Path) -> None:
    """Four equal weights give the bits of the plain mean."""
    results = []
    for weights in (None, [7, 7, 7, 7]):
        with open_engine(TINY_GPT.build(), settings(nvme, optim="nvme", params="nvme", num_micro_batches=4)) as engine:
            loss = engine.train_batch(TINY_GPT.batches(0, 4, torch.bfloat16), weights=weights).loss
            results.append((loss, engine.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def test_a_micro_batch_of_weight_zero_counts_for_nothing(nvme: Path) -> None:
    """Weight 0 leaves a micro-batch out of the mean, and its loss is still reported."""
    batches = sequences()
    with open_engine(TINY_GPT.build(), settings(nvme, bf16=False, num_micro_batches=2)) as engine:
        result = engine.train_batch(batches[:2], weights=[1, 0])
        state = engine.state_dict()
    with open_engine(TINY_GPT.build(), settings(nvme, bf16=False)) as engine:
        alone = engine.train_batch(batches[:1])
        expected = engine.state_dict()
    assert result.loss == alone.loss
    assert len(result.losses) == 2
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, 2.0, 3.0], [1.0, float("nan")]], ids=str)
def test_weights_that_do_not_fit_are_refused(weights: list[float], nvme: Path) -> None:
    """Too few, too many, negative, all zero or not a number: one sentence before anything runs, and the engine goes on."""
    with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
        with pytest.raises(ModelError, match="weights"):
            engine.train_batch(TINY_GPT.batches(0, 2, torch.bfloat16), weights=weights)
        assert not engine.train_batch(TINY_GPT.batches(0, 2, torch.bfloat16)).skipped
