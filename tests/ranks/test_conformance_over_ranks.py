"""The conformance checks over two ranks: gradients, states and scales as plain torch has them over everybody's samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance_backward as backward
import conformance_dtypes as dtypes
import conformance_engines as engines
import conformance_loop as loop
import conformance_states as states
import pytest
from rank_pool import RankPool

STAGES = (1, 2, 3)
# The stage at which each check is made in every run of the suite; the others are slow.
CHECKS = {
    backward.two_losses_of_one_forward: 3,
    backward.one_loss_of_two_forwards: 2,
    backward.coalesced_backwards: 2,
    backward.undivided_losses: 1,
    backward.scaled_losses: 1,
    backward.frozen_base: 3,
    states.edited_states: 3,
    states.one_rank_overflows: 2,
    states.loss_scale_sequence: 3,
    states.norm_over_a_change_of_scale: 1,
    states.evaluation_in_between: 3,
    states.gathered_writes: 1,
    engines.two_engines: 3,
    engines.held_back: 1,
    engines.splits_of_one_batch: 2,
    engines.groups_without_parameters: 2,
    loop.tutorial: 3,
}

EACH_BY_ITSELF = [
    backward.one_loss_of_two_forwards,
    backward.coalesced_backwards,
    backward.undivided_losses,
    backward.frozen_base,
    states.edited_states,
    states.one_rank_overflows,
]


def at_stages(values: dict[Any, int]) -> list[Any]:
    """Return every value with every stage, marked slow but for the given one."""
    return [
        pytest.param(value, stage, marks=[] if stage == quick else [pytest.mark.slow], id=f"{name_of(value)}-{stage}")
        for value, quick in values.items()
        for stage in STAGES
    ]


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def tiers_of(stage: int) -> dict[str, str]:
    """Return tiers that a stage allows, so that all of them meet in one pass over the stages."""
    return {"optim": "nvme" if stage > 1 else "cpu", "params": "nvme" if stage == 3 else "cpu"}


@pytest.mark.parametrize(("check", "stage"), at_stages(CHECKS))
def test_two_ranks_are_torch(check: Callable[..., None], stage: int, ranks: RankPool, nvme: Path) -> None:
    """C67, C75, C77, C79, C83, C94, C100 over two ranks: what each check says holds on each of them."""
    ranks.run(2, check, nvme=str(nvme), stage=stage, **tiers_of(stage))


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_take_other_branches(stage: int, ranks: RankPool, nvme: Path) -> None:
    """C86, C92: rank 0 uses branch A and rank 1 branch B in the same step: the masters are those of one process."""
    ranks.run(2, states.unbalanced_gradients, nvme=str(nvme), stage=stage, **tiers_of(stage))


def test_other_branches_where_weights_are_split_are_explained(ranks: RankPool, nvme: Path) -> None:
    """C92: in stage 3 a unit's weights come from all ranks at once: both get an error that names the unit, and no hang."""
    outcomes = ranks.outcomes(2, states.unbalanced_gradients, nvme=str(nvme), stage=3, **tiers_of(3))
    assert [outcome.exit_code for outcome in outcomes] == [8, 8]
    assert all("weights of branches.0" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize(("model", "stage"), at_stages({"odd-mlp": 1, "tiny-gpt": 3, "lora-gpt": 2}))
def test_every_element_is_torchs_over_two_ranks(model: str, stage: int, ranks: RankPool, nvme: Path) -> None:
    """C72: gradients, masters and moments of odd sizes, tied and frozen parameters, element by element."""
    ranks.run(2, states.exact_gradients, nvme=str(nvme), model=model, stage=stage, **tiers_of(stage))


@pytest.mark.parametrize(("use_reentrant", "stage"), at_stages({False: 3, True: 1}))
def test_checkpoints_inside_units_over_two_ranks(use_reentrant: bool, stage: int, ranks: RankPool, nvme: Path) -> None:
    """C95, C96: tensor.backward(gradient=...), checkpoints of both kinds in units with a frozen norm."""
    ranks.run(2, backward.tensor_backward, nvme=str(nvme), use_reentrant=use_reentrant, stage=stage, **tiers_of(stage))


@pytest.mark.parametrize(
    "check",
    [backward.two_losses_of_one_forward, *(pytest.param(one, marks=pytest.mark.slow) for one in EACH_BY_ITSELF)],
    ids=name_of,
)
def test_micro_batches_that_are_summed_by_themselves(check: Callable[..., None], ranks: RankPool, nvme: Path) -> None:
    """In horizontal order stage 3 sums every micro-batch over ranks by itself: the same gradients, also of kept graphs."""
    ranks.run(2, check, nvme=str(nvme), stage=3, schedule="horizontal", **tiers_of(3))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["boundary", "micro_batch"])
def test_several_dtypes_over_two_ranks(reduction: str, ranks: RankPool, nvme: Path) -> None:
    """C101: a bf16 base with fp32 adapters and norms has the same states in all stages that reduce alike, on both ranks."""
    runs = [
        found
        for stage in (0, *STAGES)
        for found in ranks.run(
            2, dtypes.mixed_dtypes, nvme=str(nvme), stage=stage, gradient_reduction=reduction, **tiers_of(stage)
        )
    ]
    for other in runs[1:]:
        assert all((other[name] == value).all() for name, value in runs[0].items())


@pytest.mark.slow
def test_learning_rates_do_not_depend_on_ranks(ranks: RankPool, nvme: Path) -> None:
    """C84: one, two and three ranks use the same learning rate in the same applied step."""
    found = [rates for num in (1, 2, 3) for rates in ranks.run(num, states.learning_rates, nvme=str(nvme), stage=1)]
    assert all(rates == found[0] for rates in found)


@pytest.mark.slow
def test_counters_of_a_long_run_in_bf16_over_two_ranks(ranks: RankPool, nvme: Path) -> None:
    """C59: more than 256 steps in bf16, in stage 3 on NVMe."""
    ranks.run(2, states.long_run_in_bf16, nvme=str(nvme), stage=3, **tiers_of(3))
