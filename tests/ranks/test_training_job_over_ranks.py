"""`infinity train` on several ranks with the real engine: data, files, traffic, evaluation, and going on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPool
from rank_trainings import train_job
from safetensors.torch import load_file

from infinity.models.presets import parameter_count, preset
from infinity.store.directory import list_runs
from infinity.telemetry.jsonl import read_jsonl

STEPS = 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes((i * i + 7) % 251 for i in range(5000)))
    return path


def keys(nvme: Path, stage: int, **more: object) -> dict[str, object]:
    return {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization.stage": stage,
        "infinity.nvme": str(nvme),
        "infinity.cpu_memory": "2GiB",
        "optimizer.params.eps": 1e-4,
        **more,
    }


def metrics(output: Path, name: str = "loss") -> list[Any]:
    return [record[name] for record in read_jsonl(output / "metrics.jsonl")]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_job_on_two_ranks_trains_as_on_one(ranks: RankPool, tmp_path: Path, text: Path, nvme: Path, stage: int) -> None:
    """Losses, norms, evaluation and weights agree to rounding; rank 0 writes; bytes between ranks are the plan's.

    C84: the lr of a step is the same on any number of ranks. C94: two ranks evaluate in between and train on as before.
    """
    options: dict[str, Any] = {"text": text, "steps": STEPS, "hold_out": 0.2, "eval_batches": 3, "save_weights": True}
    offload = {"zero_optimization.offload_optimizer.device": "nvme"}
    options |= {"keys": keys(nvme, stage, **offload)}
    [(alone, _)] = ranks.run(1, train_job, output=tmp_path / "alone", **options)
    together = ranks.run(2, train_job, output=tmp_path / "together", eval_every=2, **options)
    assert metrics(tmp_path / "together", "lr") == metrics(tmp_path / "alone", "lr")
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path / "together", name) == pytest.approx(metrics(tmp_path / "alone", name), rel=1e-4)
    [loss] = [evaluation["loss"] for evaluation in alone["evaluations"]]
    for summary, heard in together:
        assert [evaluation["step"] for evaluation in summary["evaluations"]] == [2, 4]
        assert summary["evaluations"][-1]["loss"] == pytest.approx(loss, rel=1e-4)
        assert heard.num_steps == STEPS
    assert len(together[0][1].rows) > len(together[1][1].rows)
    expected = load_file(tmp_path / "alone" / "weights" / "model.safetensors")
    found = load_file(tmp_path / "together" / "weights" / "model.safetensors")
    assert sum(tensor.numel() for tensor in found.values()) == parameter_count(preset("gpt-1m"))
    assert found.keys() == expected.keys()
    assert all(found[name].allclose(expected[name], rtol=1e-3, atol=2e-4) for name in expected)
    written = json.loads((tmp_path / "together" / "summary.json").read_text())
    assert [one["rank"] for one in written["ranks"]] == [0, 1]
    assert all(one["nvme_write_bytes"] > 0 and one["pss_peak_bytes"] > 0 for one in written["ranks"])
    moved = [sum(of) for of in zip(*(metrics(tmp_path / "together", name) for name in MOVED), strict=True)]
    # Step 3 comes after an evaluation, which makes the pending update of step 2 at once: it is counted with step 3.
    assert {moved[1], moved[3]} == {written["predicted_bytes_between_ranks"]}
    assert list_runs(nvme) == ()


MOVED = ("all_gather_bytes", "reduce_scatter_bytes", "broadcast_bytes")


def test_a_job_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, text: Path, nvme: Path) -> None:
    """From a checkpoint of 2 ranks: bit for bit on 2, with the same data to rounding on 1 and 3."""
    options: dict[str, Any] = {"text": text, "keys": keys(nvme, 3), "steps": STEPS}
    ranks.run(2, train_job, output=tmp_path / "whole", checkpoint_every=2, **options)
    expected = metrics(tmp_path / "whole")
    for size in (2, 1, 3):
        output = tmp_path / f"on-{size}"
        resume = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
        results = ranks.run(size, train_job, output=output, resume=resume, **options)
        assert [summary["steps_in_this_process"] for summary, _ in results] == [STEPS - 2] * size
        said = [note for note in results[0][1].notes if "bit for bit" in note]
        if size == 2:
            assert metrics(output) == expected[2:]
            assert said == []
        else:
            assert metrics(output) == pytest.approx(expected[2:], rel=1e-4)
            assert said == [f"num_ranks was 2 in the checkpoint and is {size} now: the run goes on, but not bit for bit."]


def test_what_fails_between_steps_on_one_rank_ends_all(ranks: RankPool, tmp_path: Path, text: Path, nvme: Path) -> None:
    """Rank 1 loses its data: it says so, rank 0 quotes it; the steps before are in the metrics, no swap file stays."""
    mine = tmp_path / "of-rank-1"
    mine.write_bytes(text.read_bytes())
    outcomes = ranks.outcomes(
        2, train_job, output=tmp_path / "out", keys=keys(nvme, 3), steps=STEPS,
        by_rank=[{"text": text}, {"text": mine, "lose": mine}],
    )  # fmt: skip
    assert [outcome.error for outcome in outcomes] == ["CommError", "DataError"]
    assert "is shorter now" in outcomes[1].message
    assert "Rank 1 failed" in outcomes[0].message
    assert "is shorter now" in outcomes[0].message
    assert metrics(tmp_path / "out", "step") == [1, 2]
    assert list_runs(nvme) == ()
