"""Optimizers of torch over ranks: every stage has the same bits, and each rank keeps the state of its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import settings
from rank_optimizers import open_with, read_and_write, save_what_one_rank_cannot, train_on
from rank_pool import RankPool

TYPES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "NAdam": {"lr": 2e-3},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.02, "initial_accumulator_value": 0.1},
}


def config(nvme: Path, name: str, stage: int, **options: Any) -> dict[str, Any]:
    values = settings(nvme, params="none", num_micro_batches=2, clip=0.5, **options)
    values["zero_optimization"]["stage"] = stage
    values["optimizer"] = {"type": name, "params": TYPES[name]}
    return values


@pytest.mark.parametrize(
    ("kit", "name", "bf16"),
    [
        ("branchy", "SGD", False),
        ("odd-mlp", "Lion", True),
        pytest.param("tiny-gpt", "NAdam", True, marks=pytest.mark.slow),
        pytest.param("odd-mlp", "Adagrad", False, marks=pytest.mark.slow),
    ],
)
def test_every_stage_has_the_same_bits(kit: str, name: str, bf16: bool, ranks: RankPool, nvme: Path) -> None:
    """C66: losses, masters and state of two ranks have the same bits in stages 0 to 3; from 1 on a rank keeps half of it."""
    found = {
        stage: ranks.run(2, train_on, kit=kit, config=config(nvme, name, stage, bf16=bf16), until=3) for stage in range(4)
    }
    expected = found[0][0]
    assert len(expected.losses) == 3
    for stage, both in found.items():
        for one in both:
            assert (one.losses, one.weights, one.state) == (expected.losses, expected.weights, expected.state), stage
        share = 1.0 if stage == 0 else 0.5
        assert sum(one.state_bytes for one in both) == pytest.approx(2 * share * expected.state_bytes, rel=0.05)


@pytest.mark.slow
def test_gradients_of_each_micro_batch_make_the_same_updates(ranks: RankPool, nvme: Path) -> None:
    """In horizontal order, where stages 2 and 3 reduce each micro-batch into the part that the rule then takes."""
    found = [
        ranks.run(2, train_on, kit="odd-mlp", config=config(nvme, "SGD", stage, schedule="horizontal"), until=3)
        for stage in (2, 3)
    ]
    assert [(one.losses, one.weights, one.state) for one in found[0]] == [
        (one.losses, one.weights, one.state) for one in found[1]
    ]
    assert found[0][0].weights == found[0][1].weights


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bf16", "fp32"])
def test_a_checkpoint_goes_to_other_stages_and_ranks(bf16: bool, ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """Saved by two ranks in stage 3, state and counts resume in stage 1 bit for bit, and load on one and on three ranks."""

    def run(size: int, stage: int, **options: Any) -> Any:
        return ranks.run(size, train_on, kit="odd-mlp", config=config(nvme, "NAdam", stage, bf16=bf16), **options)

    saved = str(tmp_path / "checkpoints")
    through = run(2, 3, until=4)
    first = run(2, 3, until=2, save=saved)
    second = run(2, 1, until=4, load=saved)
    for rank in range(2):
        assert first[rank].losses + second[rank].losses == through[rank].losses
        assert (second[rank].weights, second[rank].state) == (through[rank].weights, through[rank].state)
    for size in (1, 3):
        for found in run(size, 2, until=2, load=saved):
            assert (found.weights, found.state) == (first[0].weights, first[0].state)


@pytest.mark.parametrize(("name", "key"), [("SGD", "momentum_buffer"), ("AdamW", "exp_avg")])
def test_states_are_whole_on_every_rank(name: str, key: str, ranks: RankPool, nvme: Path) -> None:
    """C63: a state by name is whole, its local part is this rank's, and it can be replaced by itself and by state_dict."""
    assert ranks.run(2, read_and_write, config=config(nvme, name, 2), key=key) == [(True, True, True)] * 2


def test_what_needs_whole_parameters_keeps_to_stage_0(ranks: RankPool, nvme: Path) -> None:
    """Adafactor over two ranks trains in stage 0 and is refused in stage 1, on both ranks and by name."""
    for said in ranks.run(2, open_with, given="Adafactor", config=config(nvme, "SGD", 1)):
        assert "Adafactor, which needs whole parameters" in said
    for said in ranks.run(2, open_with, given="Adafactor", config=config(nvme, "SGD", 0)):
        assert "Adafactor is torch's" in said


def test_a_state_that_one_rank_cannot_save_is_every_ranks_error(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """Neither rank waits for the other; both name the state, and a later checkpoint is written."""
    directory = str(tmp_path / "checkpoints")
    found = ranks.run(2, save_what_one_rank_cannot, config=config(nvme, "SGD", 1), directory=directory)
    assert [saved for _, saved in found] == [True, True]
    for said, _ in found:
        assert "words of" in said
        assert "is a str, which no checkpoint holds" in said
    assert "Rank 1: " in found[0][0]
