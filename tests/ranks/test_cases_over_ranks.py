"""Models and configurations that are hard for ranks: shapes smaller than the world, tied and unused weights, split batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from agreement import require_same_bits
from matrix_cells import STAGES, Cell, Tier
from rank_episodes import train_late_and_slowly
from rank_models import CLIP, MODELS, TorchRun, torch_run
from rank_pool import RankPool
from rank_training import RankRun, asked_of, train

# Stage, optimizer tier and parameter tier: weights off the compute tier need stage 3.
PLACES: tuple[tuple[int, Tier, Tier], ...] = (
    *((stage, "none", "none") for stage in STAGES),
    (1, "nvme", "none"),
    (2, "cpu", "none"),
    (3, "nvme", "nvme"),
)


def fp32(num_ranks: int, place: tuple[int, Tier, Tier], num_micro_batches: int = 1) -> Cell:
    """Return a cell of the matrix in fp32 and vertical order."""
    stage, optim, params = place
    return Cell(num_ranks, "fp32", stage, optim, params, num_micro_batches, "vertical")


def require_torch(runs: Sequence[RankRun], torch_said: TorchRun) -> None:
    """Fail unless losses and gradient norms are plain PyTorch's to 1e-5 and every weight to 1e-5 of its largest."""
    for run in runs:
        for result, loss, norm in zip(run.results, torch_said.losses, torch_said.grad_norms, strict=True):
            assert result.loss == pytest.approx(loss, rel=1e-5)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
            assert result.clip_coefficient == pytest.approx(min(1.0, CLIP / (norm + 1e-6)), rel=1e-5)
    for name, value in torch_said.state.items():
        limit = 1e-5 * max(1.0, float(value.abs().max()))
        assert float((runs[0].state[name] - value).abs().max()) <= limit, name


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensors_smaller_than_the_world(num_ranks: int, ranks: RankPool, nvme: Path) -> None:
    """C13: a head of one output and a scalar, on all stages and tiers: they agree to the bit, and with one rank's torch."""
    expected = torch_run("odd-mlp", num_steps=2)
    first = None
    for place in PLACES:
        runs = ranks.run(num_ranks, train, asked=asked_of(fp32(num_ranks, place), nvme, 2, model="odd-mlp"))
        first = first or runs
        require_same_bits(runs, first)
    require_torch(first or [], expected)


@pytest.mark.parametrize("place", [PLACES[0], *PLACES[-3:]], ids=lambda place: "-".join(map(str, place)))
def test_split_of_a_batch_changes_nothing(place: tuple[int, Tier, Tier], ranks: RankPool, nvme: Path) -> None:
    """C67, C73: accumulation 1, 2, 4 and 8 of one global batch on two ranks: norm and new weights are torch's to 1e-6."""
    expected = torch_run("tiny-gpt", num_steps=1, num_rows=16)
    for num_micro_batches in (1, 2, 4, 8):
        asked = asked_of(fp32(2, place, num_micro_batches), nvme, 1, num_rows=16)
        run = ranks.run(2, train, asked=asked)[0]
        assert run.results[0].grad_norm == pytest.approx(expected.grad_norms[0], rel=1e-6)
        for name, value in expected.state.items():
            assert torch.allclose(run.state[name], value, rtol=1e-6, atol=1e-6), name


def test_twenty_steps_of_every_stage(ranks: RankPool, nvme: Path) -> None:
    """C71, C73, C89: stages 0 to 3 with accumulation 2 on two ranks: one curve, that of torch on one process to 1e-5."""
    expected = torch_run("tiny-gpt", num_steps=20, num_micro_batches=4)
    first = None
    for stage in STAGES:
        runs = ranks.run(2, train, asked=asked_of(fp32(2, (stage, "nvme", "none"), 2), nvme, 20))
        first = first or runs
        require_same_bits(runs, first)
    require_torch(first or [], expected)


def test_shared_and_unused_weights(ranks: RankPool, nvme: Path) -> None:
    """C72: a tied weight's gradient counts once with both contributions, a layer that nothing uses is not touched."""
    expected = torch_run("unused-gpt", num_steps=3)
    untouched = MODELS["unused-gpt"].kit.build().state_dict()
    for place in PLACES:
        runs = ranks.run(2, train, asked=asked_of(fp32(2, place), nvme, 3, model="unused-gpt"))
        require_torch(runs, expected)
        for name in ("unused.weight", "unused.bias"):
            assert torch.equal(runs[0].state[name], untouched[name])


def test_norm_before_clipping_and_coefficient_are_both_said(ranks: RankPool, nvme: Path) -> None:
    """C74, C89: every rank reports the norm over all ranks before clipping, and the coefficient that follows from it."""
    runs = ranks.run(2, train, asked=asked_of(fp32(2, (2, "nvme", "none")), nvme, 2))
    for run in runs:
        for result in run.results:
            assert result.grad_norm > CLIP
            assert result.clip_coefficient == CLIP / (result.grad_norm + 1e-6)
    assert [result.grad_norm for result in runs[0].results] == [result.grad_norm for result in runs[1].results]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_off_the_compute_tier_need_stage_3(stage: int, ranks: RankPool, nvme: Path) -> None:
    """C88: what is not supported is refused on every rank, in a sentence that names the stage that can do it."""
    cell = fp32(2, (stage, "nvme", "nvme"))
    for outcome in ranks.outcomes(2, train, asked=asked_of(cell, nvme, 1)):
        assert outcome.error == "ConfigError", outcome
        assert "stage 3" in outcome.message
    assert list(nvme.iterdir()) == []


def test_slow_disks_and_late_ranks_change_no_bit(ranks: RankPool, nvme: Path) -> None:
    """C90: with random delays in I/O and before each step, on every rank others, losses and weights are the same."""
    asked = asked_of(fp32(2, (3, "nvme", "nvme"), 2), nvme, 8)
    require_same_bits(ranks.run(2, train_late_and_slowly, asked=asked), ranks.run(2, train, asked=asked))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slow_disks_over_200_steps(ranks: RankPool, nvme: Path) -> None:
    """C90: the same over 200 steps, with three ranks."""
    asked = asked_of(fp32(3, (3, "nvme", "nvme"), 2), nvme, 200)
    late = ranks.run(3, train_late_and_slowly, asked=asked, seconds=400)
    require_same_bits(late, ranks.run(3, train, asked=asked, seconds=400))
