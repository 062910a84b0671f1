"""Ranks that take other branches, reach other experts, have less data or fail: they train, or say why within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from matrix_cells import STAGES, Cell, Tier
from rank_episodes import end_early, fail_in_step
from rank_models import MODELS, torch_run
from rank_pool import RankPool
from rank_training import Asked, asked_of, train
from test_cases_over_ranks import require_torch

ERROR_SECONDS = 10.0  # until a job that cannot go on says so; starting it comes on top


def asked_in(model: str, stage: int, nvme: Path, *, num_steps: int = 3, optim: Tier = "nvme", **own: object) -> Asked:
    """Return a run of two ranks in fp32, everything on NVMe that may be there."""
    cell = Cell(2, "fp32", stage, optim, "nvme" if stage == 3 else "none", 2, "vertical")
    asked = asked_of(cell, nvme, num_steps, model=model)
    asked.config["infinity"].update(own)
    return asked


@pytest.mark.parametrize("stage", STAGES)
def test_an_expert_that_no_token_chose(stage: int, ranks: RankPool, nvme: Path) -> None:
    """C91: top-1 of 4 experts, each rank reaching others and one reached by none: what one process gives, and no hang.

    The expert that no token chose keeps its weights, as in torch; an update there would decay them.
    """
    runs = ranks.run(2, train, asked=asked_in("tiny-moe", stage, nvme))
    require_torch(runs, torch_run("tiny-moe", num_steps=3, num_micro_batches=4))
    start = MODELS["tiny-moe"].kit.build().state_dict()
    never, once = "blocks.0.experts.3.up.weight", "blocks.0.experts.0.up.weight"
    assert runs[0].state[never].equal(start[never])
    assert not runs[0].state[once].equal(start[once])


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", ["forked", "tiny-moe"])
def test_branches_of_resident_weights(model: str, stage: int, ranks: RankPool, nvme: Path) -> None:
    """C92: rank 0 takes branch A, rank 1 branch B, each a unit of its own: what one process gives."""
    own = {"units": ["Expert"]} if model == "tiny-moe" else {}
    runs = ranks.run(2, train, asked=asked_in(model, stage, nvme, **own))
    require_torch(runs, torch_run(model, num_steps=3, num_micro_batches=4))


@pytest.mark.parametrize("model", ["forked", "tiny-moe"])
def test_branches_of_partitioned_weights(model: str, ranks: RankPool, nvme: Path) -> None:
    """C92: where weights are gathered for every use, ranks in different branches get an error that names both orders."""
    own = {"units": ["Expert"]} if model == "tiny-moe" else {}
    asked = asked_in(model, 3, nvme, **own)
    before = time.monotonic()
    outcomes = ranks.outcomes(2, train, asked=asked, seconds=60)
    assert time.monotonic() - before < ERROR_SECONDS + 20  # the start of the engines included
    for outcome in outcomes:
        assert outcome.error == "CommError", outcome
        assert outcome.exit_code == 8
        assert "branches" in outcome.message or "experts" in outcome.message
        assert "rank 0" in outcome.message.lower()
        assert "rank 1" in outcome.message.lower()
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("early_rank", [0, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_whose_data_ends_early(stage: int, early_rank: int, ranks: RankPool, nvme: Path) -> None:
    """C92: the others get an error that says which rank ended, and in which step they are; nobody waits for ever."""
    before = time.monotonic()
    outcomes = ranks.outcomes(2, end_early, asked=asked_in("tiny-gpt", stage, nvme), early_rank=early_rank, seconds=60)
    assert time.monotonic() - before < ERROR_SECONDS + 20
    waiting = outcomes[1 - early_rank]
    assert waiting.error == "CommError", waiting
    assert f"rank {early_rank}" in waiting.message.lower()
    assert "step 3" in waiting.message
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_fails_tells_the_others(stage: int, ranks: RankPool, nvme: Path) -> None:
    """An exception in one rank's model is its own error there, and an error with its reason and exit code 8 elsewhere."""
    outcomes = ranks.outcomes(2, fail_in_step, asked=asked_in("tiny-gpt", stage, nvme), failing_rank=1, seconds=60)
    assert outcomes[1].error == "IndexError", outcomes[1]
    assert outcomes[0].error == "CommError", outcomes[0]
    assert outcomes[0].exit_code == 8
    assert "rank 1" in outcomes[0].message.lower()
    assert list(nvme.iterdir()) == []
