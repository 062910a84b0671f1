"""Single parameters over ranks: whole or by parts, in every stage and tier, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit import settings
from rank_checkpoints import Seen
from rank_fragments import (
    build_under_init,
    gather_and_write,
    on_separate_device,
    set_without_a_gradient,
    touch_every_state,
    write_against_the_rules,
)
from rank_pool import RankPool

PLACES = [(0, "cpu", "none"), (1, "nvme", "none"), (2, "cpu", "none"), (3, "nvme", "nvme"), (3, "cpu", "cpu")]


def on(nvme: Path, place: tuple[int, str, str], **options: Any) -> dict[str, Any]:
    stage, optim, params = place
    config = settings(nvme, optim=optim, params=params, num_micro_batches=2, **options)
    config["zero_optimization"]["stage"] = stage
    return config


@pytest.mark.parametrize(
    ("kit", "size", "options", "places"),
    [
        ("odd-mlp", 2, {"tile_bytes": "64KiB"}, PLACES[0::3]),
        pytest.param("odd-mlp", 2, {"bf16": False}, PLACES, marks=pytest.mark.slow),
        pytest.param("odd-mlp", 4, {"fp16": {"initial_scale_power": 4}}, PLACES, marks=pytest.mark.slow),
        pytest.param("lora-gpt-embedding", 3, {}, PLACES, marks=pytest.mark.slow),
        pytest.param("lora-gpt-embedding", 2, {"fp16": {"initial_scale_power": 4}}, PLACES, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp32", "fp16 on 4", "partly frozen on 3", "partly frozen fp16"],
)
def test_states_are_read_and_replaced_in_every_stage(
    kit: str, size: int, options: dict[str, Any], places: Sequence[tuple[int, str, str]], ranks: RankPool, nvme: Path
) -> None:
    """C13: every state of every parameter, whole and by parts, checked by each rank; the steps after it agree to the bit."""
    first = None
    for place in places:
        config = on(nvme, place, gradient_reduction="boundary", **options)  # else stages sum at different moments
        runs = ranks.run(size, touch_every_state, kit=kit, config=config)
        first = first or runs
        for run, reference in zip(runs, first, strict=True):
            assert run == reference, place
        assert len({(run.weights, run.moments) for run in runs}) == 1


@pytest.mark.parametrize(
    ("options", "places"),
    [({}, PLACES[1::2]), pytest.param({"fp16": {"initial_scale_power": 4}}, PLACES, marks=pytest.mark.slow)],
    ids=["bf16", "fp16"],
)
def test_what_the_modifier_rank_writes_is_everybodys(
    options: dict[str, Any], places: Sequence[tuple[int, str, str]], ranks: RankPool, nvme: Path
) -> None:
    """GatheredParameters over ranks, and writes into parameters that stay in memory: equal values in every stage."""
    first = None
    for place in places:
        runs = ranks.run(2, gather_and_write, kit="tiny-gpt", config=on(nvme, place, **options))
        first = first or runs
        assert runs == first, place
        assert runs[0].weights == runs[1].weights


@pytest.mark.slow
@pytest.mark.parametrize("place", [(0, "cpu", "none"), (1, "nvme", "none"), (3, "cpu", "none"), (3, "nvme", "cpu")])
@pytest.mark.parametrize("work", [touch_every_state, gather_and_write])
def test_states_beside_a_device_with_memory_of_its_own(
    work: Callable[..., Seen], place: tuple[int, str, str], ranks: RankPool, nvme: Path
) -> None:
    """Weights on the device, masters in host memory or on NVMe: states and steps are those of ranks with one memory."""
    found = ranks.run(2, on_separate_device, work=work, kit="tiny-gpt", config=on(nvme, place))
    assert found == ranks.run(2, work, kit="tiny-gpt", config=on(nvme, (3, "cpu", "cpu")))


def test_writes_that_nobody_may_make_are_refused_on_every_rank(ranks: RankPool, nvme: Path) -> None:
    """A write without a modifier on one rank is every rank's error; another rank's write beside the modifier is lost."""
    for said in ranks.run(2, write_against_the_rules, config=on(nvme, (3, "nvme", "nvme"))):
        assert said["no modifier"].startswith("IllegalTransition: blocks.0.up.weight was written inside GatheredParameters")
        assert said["rank 9"].startswith(
            "ModelError: GatheredParameters was given modifier_rank=9, but the ranks are 0 to 1."
        )
        assert said["another rank"] == ""


@pytest.mark.parametrize("place", [(0, "cpu", "none"), (2, "nvme", "none")], ids=["0", "2"])
def test_a_gradient_that_one_rank_has_is_there_on_all(place: tuple[int, str, str], ranks: RankPool, nvme: Path) -> None:
    """Ranks that went through different branches read the same gradients; what no rank used has none and takes none."""
    first, second = ranks.run(2, set_without_a_gradient, config=on(nvme, place, bf16=False))
    assert first == second
    assert {first[f"branches.{branch}.weight"] for branch in (0, 1)} == {"True"}
    assert first["branches.2.weight"] == ""
    assert first["set"].startswith("IllegalTransition: Parameter branches.2.weight has no gradient in this step")


def test_values_under_init_are_those_of_rank_0(ranks: RankPool, nvme: Path) -> None:
    """zero.Init on ranks that build with other seeds: all train what rank 0 has built."""
    config = on(nvme, (3, "nvme", "nvme"))
    expected = ranks.run(1, build_under_init, config=config, seed_of_rank=[4])[0]
    for found in ranks.run(2, build_under_init, config=config, seed_of_rank=[4, 5]):
        assert found.weights == expected.weights
