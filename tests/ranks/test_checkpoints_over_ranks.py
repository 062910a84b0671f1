"""Checkpoints over ranks: one format for any number of them, and nothing half where one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import settings
from rank_checkpoints import (
    adopt,
    die_in_a_save,
    fill_the_disk_in_the_middle,
    load,
    load_and_train,
    load_apart,
    refuse_in_place,
    save_in_place_and_stop,
    train_and_save,
    train_through,
)
from rank_pool import RankPool

SAVED_AT, LAST = 2, 4


def on(nvme: Path, stage: int, *, optim: str = "nvme", params: str = "none", **options: Any) -> dict[str, Any]:
    config = settings(nvme, optim=optim, params=params, num_micro_batches=2, **options)
    config["zero_optimization"]["stage"] = stage
    return config


@pytest.mark.parametrize(
    ("kit", "saved_on", "loaded_on"),
    [
        ("dropout-gpt", {"stage": 3, "params": "nvme"}, {"stage": 1}),
        pytest.param(
            "odd-mlp",
            {"stage": 2, "optim": "cpu", "bf16": False},
            {"stage": 3, "params": "cpu", "bf16": False},
            marks=pytest.mark.slow,
        ),
        ("tiny-gpt", {"stage": 0, "fp16": {"initial_scale_power": 8}}, {"stage": 2, "fp16": {"initial_scale_power": 8}}),
        pytest.param("lora-gpt", {"stage": 0, "optim": "cpu"}, {"stage": 1}, marks=pytest.mark.slow),
    ],
    ids=["3 to 1", "2 to 3", "0 to 2", "0 to 1"],
)
def test_two_ranks_resume_to_the_bit(
    kit: str, saved_on: dict[str, Any], loaded_on: dict[str, Any], ranks: RankPool, nvme: Path, tmp_path: Path
) -> None:
    """C104: saved and loaded on 2 ranks, in another stage and on other tiers: as if it had never stopped; generators too."""
    directory = str(tmp_path / "checkpoints")
    expected = ranks.run(2, train_through, kit=kit, config=on(nvme, **saved_on), num_steps=LAST)
    saved = ranks.run(2, train_and_save, kit=kit, config=on(nvme, **saved_on), num_steps=SAVED_AT, directory=directory)
    resumed = ranks.run(2, load_and_train, kit=kit, config=on(nvme, **loaded_on), directory=directory, until=LAST)
    for rank in range(2):
        assert saved[rank].losses + resumed[rank].losses == expected[rank].losses
        assert (resumed[rank].weights, resumed[rank].moments) == (expected[0].weights, expected[0].moments)
        assert resumed[rank].facts["drawn"] == saved[rank].facts["drawn"]
        assert resumed[rank].facts["client_state"] == {"rank": 0}  # rank 0's, for all
        assert resumed[rank].facts["path"] == saved[0].facts["path"] == saved[1].facts["path"]


@pytest.mark.parametrize(
    ("options", "fp16"),
    [
        ({"bf16": True}, None),
        pytest.param({"bf16": False}, None, marks=pytest.mark.slow),
        pytest.param({}, {"initial_scale_power": 8}, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp32", "fp16"],
)
def test_saved_on_two_ranks_loads_on_one_and_three(
    options: dict[str, Any], fp16: dict[str, Any] | None, ranks: RankPool, nvme: Path, tmp_path: Path
) -> None:
    """World sizes 1, 3 and 4 load what 2 have saved: every weight and moment, bit for bit; and 2 what 3 have saved."""
    first, second = str(tmp_path / "of-two"), str(tmp_path / "of-three")
    config = on(nvme, 3, params="nvme", fp16=fp16, **options)
    saved = ranks.run(2, train_and_save, kit="odd-mlp", config=config, num_steps=1, directory=first)[0]
    for size, stage, params in ((1, 0, "nvme"), (4, 1, "none")):
        config = on(nvme, stage, params=params, fp16=fp16, **options)
        for found in ranks.run(size, load, kit="odd-mlp", config=config, directory=first):
            assert (found.weights, found.moments) == (saved.weights, saved.moments)
    config = on(nvme, 2, fp16=fp16, **options)
    again = ranks.run(3, load_and_train, kit="odd-mlp", config=config, directory=first, until=1)[0]
    assert (again.weights, again.moments) == (saved.weights, saved.moments)
    saved = ranks.run(3, train_and_save, kit="odd-mlp", config=config, num_steps=1, directory=second)[0]
    for found in ranks.run(2, load, kit="odd-mlp", config=config, directory=second):
        assert (found.weights, found.moments) == (saved.weights, saved.moments)


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_bit(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """Both ranks die after a step that nothing kept: new processes load the checkpoint and end where one run had."""
    config, directory = on(nvme, 3, params="nvme"), str(tmp_path / "checkpoints")
    expected = ranks.run(2, train_through, kit="dropout-gpt", config=config, num_steps=LAST)
    asked = {"kit": "dropout-gpt", "config": config, "directory": directory}
    killed = ranks.outcomes(2, train_and_save, num_steps=SAVED_AT, die_after=1, **asked)
    assert [outcome.error for outcome in killed] == ["died", "died"]
    resumed = ranks.run(2, load_and_train, until=LAST, **asked)
    for rank in range(2):
        assert resumed[rank].losses == expected[rank].losses[SAVED_AT:]
        assert (resumed[rank].weights, resumed[rank].moments) == (expected[rank].weights, expected[rank].moments)
    assert list(nvme.iterdir()) == []  # the dead run's swap files went when the new one began, its own at the end


def test_a_full_disk_is_every_ranks_error_and_changes_nothing(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """C107 over ranks: the checkpoint before stays, all go on, and the next save loads as if nothing had been."""
    config, directory = on(nvme, 3, params="cpu"), tmp_path / "checkpoints"
    expected = ranks.run(2, train_through, kit="dropout-gpt", config=config, num_steps=4)
    first, second = ranks.run(2, fill_the_disk_in_the_middle, config=config, directory=str(directory))
    assert first.facts["said"].startswith("SwapSpaceError: Writing")
    assert second.facts["said"] == first.facts["said"].replace("SwapSpaceError: ", "SwapSpaceError: Rank 0: ")
    assert first.facts["num_writes"] == 40
    assert second.facts["num_writes"] == 0
    assert first.facts["left"] == second.facts["left"] == ["step-00000002"]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000004"]
    assert [run.losses for run in (first, second)] == [run.losses for run in expected]
    loaded = ranks.run(2, load, kit="dropout-gpt", config=config, directory=str(directory))
    assert {found.weights for found in loaded} == {expected[0].weights}


@pytest.mark.parametrize("dying_rank", [0, 1])
@pytest.mark.slow
def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint_that_counts(
    dying_rank: int, ranks: RankPool, nvme: Path, tmp_path: Path
) -> None:
    """C131: SIGKILL during the save: the other rank gets a CommError, the checkpoint before is what is loaded next."""
    config, directory = on(nvme, 2), tmp_path / "checkpoints"
    outcomes = ranks.outcomes(2, die_in_a_save, config=config, directory=str(directory), dying_rank=dying_rank)
    assert outcomes[dying_rank].error == "died"
    assert (outcomes[1 - dying_rank].error, outcomes[1 - dying_rank].exit_code) == ("CommError", 8)
    complete = [path.name for path in directory.iterdir() if "partial" not in path.name]
    assert complete == ["step-00000001"]
    found = ranks.run(2, load_and_train, kit="tiny-gpt", config=config, directory=str(directory), until=2)
    assert found[0].facts["path"] == str(directory / "step-00000001")
    assert list(nvme.iterdir()) == []


def test_swap_files_are_no_checkpoint_of_several_ranks(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """Without room for a copy the save is refused on every rank, in a sentence; training goes on."""
    for said in ranks.run(2, refuse_in_place, config=on(nvme, 3), directory=str(tmp_path / "checkpoints")):
        assert "SwapSpaceError" in said.facts["said"]
        assert "Over several ranks the swap files cannot be the checkpoint instead." in said.facts["said"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_another_precision_or_model_is_refused_on_every_rank(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """C4: bf16 and fp32 over one directory, and another model: a mismatch that names the parameter, on all ranks."""
    directory = str(tmp_path / "checkpoints")
    ranks.run(4, train_and_save, kit="tiny-gpt", config=on(nvme, 3, params="nvme"), num_steps=1, directory=directory)
    for kit, bf16 in (("tiny-gpt", False), ("odd-mlp", True)):
        config = on(nvme, 3, params="nvme", bf16=bf16)
        for outcome in ranks.outcomes(4, load, kit=kit, config=config, directory=directory):
            assert outcome.error == "CheckpointMismatch", outcome
            assert "belongs to another model: parameter" in outcome.message


def test_ranks_that_open_different_checkpoints_are_told(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """Two machines with another newest checkpoint each must not go on from both: refused, nothing changed."""
    found = ranks.run(2, load_apart, config=on(nvme, 1), directory=str(tmp_path / "checkpoints"))
    for run in found:
        assert "Rank 0 opens the checkpoint step-00000001 of step 1" in run.facts["said"]
        assert "rank 1 opens step-00000002 of step 2" in run.facts["said"]
    expected = ranks.run(2, train_through, kit="tiny-gpt", config=on(nvme, 1), num_steps=2)
    assert [run.losses for run in found] == [run.losses[1:] for run in expected]


def test_swap_files_of_one_rank_do_not_serve_two(ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """A checkpoint in place of one rank is refused by name where several would adopt it."""
    directory = tmp_path / "checkpoints"
    config = on(nvme, 0, params="nvme")
    ranks.run(1, save_in_place_and_stop, config=config, directory=str(directory))
    for outcome in ranks.outcomes(2, adopt, config=on(nvme, 3, params="nvme"), checkpoint=str(directory / "step-00000000")):
        assert outcome.error == "CheckpointMismatch"
        assert "lies in the swap files of one rank" in outcome.message
