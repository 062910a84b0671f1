"""DeepSpeed's schedulers: the numbers that their public formulas give, computed here with the formulas written out."""

from __future__ import annotations

import math

import pytest

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.optim.course import Course, build_course

LR = 0.2


def course(kind: str, *, num_steps: int | None = None, **params: object) -> Course:
    section = Config.from_any({"scheduler": {"type": kind, "params": params}}).scheduler
    return build_course(section.of_group(0, 1), group_lr=LR, num_steps=num_steps)


def rates(kind: str, steps: range, *, num_steps: int | None = None, **params: object) -> list[float]:
    lr = course(kind, num_steps=num_steps, **params).lr
    return [lr(step) for step in steps]


def rise(step: int, num: int, kind: str) -> float:
    return math.log(step + 1) / math.log(num) if kind == "log" else step / num


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_rises_from_the_least_to_the_most_and_stays(kind: str) -> None:
    """WarmupLR is min + (max - min) log(k + 1) / log(n), or k / n, and max from step n on."""
    got = rates("WarmupLR", range(14), warmup_min_lr=0.01, warmup_max_lr=0.1, warmup_num_steps=10, warmup_type=kind)
    expected = [0.01 + 0.09 * rise(step, 10, kind) for step in range(10)] + [0.1] * 4
    assert got == pytest.approx(expected, rel=1e-12)
    assert got[0] == 0.01


def test_warmup_numbers_by_hand() -> None:
    """Four steps of a logarithmic warm-up over 8: 0, 1/3, log 3 / log 8, 2/3 of the peak."""
    got = rates("WarmupLR", range(4), warmup_max_lr=3.0, warmup_num_steps=8)
    assert got == pytest.approx([0.0, 1.0, 1.584962500721156, 2.0], rel=1e-12)


def test_defaults_are_the_documented_ones() -> None:
    """Without parameters: 1000 logarithmic steps from 0 up to the optimizer's own lr (C81)."""
    got = rates("WarmupLR", range(0, 2001, 250))
    assert got == pytest.approx([LR * min(1.0, math.log(step + 1) / math.log(1000)) for step in range(0, 2001, 250)])
    assert rates("LRRangeTest", range(0, 4001, 1000)) == pytest.approx([1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3])


def test_a_warmup_of_one_step_is_one_of_two() -> None:
    """warmup_num_steps 1 counts as 2, which the logarithm can be divided by."""
    assert rates("WarmupLR", range(3), warmup_num_steps=1) == rates("WarmupLR", range(3), warmup_num_steps=2) == [0, LR, LR]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_decay_goes_back_in_a_straight_line(kind: str) -> None:
    """WarmupDecayLR is WarmupLR up to step n, then max (T - k) / (T - n), and 0 from T on."""
    params = {"total_num_steps": 30, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": kind}
    got = rates("WarmupDecayLR", range(34), **params)
    expected = [0.1 * rise(step, 10, kind) for step in range(10)] + [0.1 * max(0, 30 - step) / 20 for step in range(10, 34)]
    assert got == pytest.approx(expected, rel=1e-12)
    assert got[10] == 0.1
    assert got[30:] == [0.0] * 4


def test_the_run_gives_the_length_that_is_not_given() -> None:
    """total_num_steps that is absent or auto is the number of steps of the run; without both it is an error."""
    given = {"warmup_num_steps": 4, "total_num_steps": 12}
    for kind in ("WarmupDecayLR", "WarmupCosineLR", "linear", "cosine"):
        told = rates(kind, range(14), **given)
        assert rates(kind, range(14), num_steps=12, warmup_num_steps=4, total_num_steps="auto") == told
        with pytest.raises(ConfigError, match=f"{kind}, but nothing says how long the run is"):
            course(kind, warmup_num_steps=4)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup_cosine_is_a_share_of_the_groups_rate(kind: str) -> None:
    """WarmupCosineLR rises from a share of lr to lr, then follows half a cosine, one step ahead, to its least share."""
    got = rates(
        "WarmupCosineLR",
        range(36),
        total_num_steps=30,
        warmup_num_steps=10,
        warmup_min_ratio=0.2,
        cos_min_ratio=0.1,
        warmup_type=kind,
    )
    expected = [LR * (0.2 + 0.8 * rise(step, 10, kind)) for step in range(10)]
    expected += [LR * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (step - 9) / 20))) / 2) for step in range(10, 36)]
    assert got == pytest.approx(expected, rel=1e-12)
    assert got[29:] == pytest.approx([LR * 0.1] * 7, rel=1e-12)


def test_range_test_rises_in_a_line_or_in_stairs() -> None:
    """LRRangeTest is min (1 + rate k / n), with whole intervals only where stairs are asked for."""
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5}
    assert rates("LRRangeTest", range(9), **params) == pytest.approx([0.01 * (1 + 0.5 * k / 4) for k in range(9)])
    stairs = rates("LRRangeTest", range(9), lr_range_test_staircase=True, **params)
    assert stairs == pytest.approx([0.01] * 4 + [0.015] * 4 + [0.02])


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 8}


def test_one_cycle_goes_up_down_and_decays() -> None:
    """OneCycle: a line up in 4 steps, down in 8, then min / (1 + rate (k - 12) / n)."""
    got = rates("OneCycle", range(18), decay_step_size=2, decay_lr_rate=0.5, **CYCLE)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1]
    expected += [0.1 / (1 + 0.5 * (step - 12) / 2) for step in range(13, 18)]
    assert got == pytest.approx(expected, rel=1e-12)


def test_one_cycle_without_decay_stays_at_its_least() -> None:
    """A decay rate without a step size for it, and neither of them, leave the least rate; the halves are alike."""
    for more in ({}, {"decay_lr_rate": 0.5}, {"decay_step_size": 3}):
        got = rates("OneCycle", range(7, 20), **{**CYCLE, "cycle_second_step_size": None}, **more)
        assert got == pytest.approx([0.2] + [0.1] * 12)


def test_one_cycle_on_stairs() -> None:
    """Stairs hold the rate: two of them in the first half, and as many in the second unless it has its own number."""
    same = rates("OneCycle", range(13), cycle_first_stair_count=2, **CYCLE)
    assert same == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    line = rates("OneCycle", range(13), cycle_first_stair_count=2, cycle_second_stair_count=0, **CYCLE)
    assert line[5:] == pytest.approx([0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1])


def test_momentum_cycles_against_the_rate() -> None:
    """OneCycle moves the first beta from its most to its least and back, and leaves it at its most after the cycle."""
    beta1 = course("OneCycle", cycle_min_mom=0.5, cycle_max_mom=0.9, **CYCLE).beta1
    assert beta1 is not None
    got = [beta1(step) for step in range(15)]
    assert got == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.9])
    assert course("OneCycle", cycle_momentum=False, **CYCLE).beta1 is None
    assert course("WarmupLR").beta1 is None


@pytest.mark.parametrize(
    ("kind", "params", "sentence"),
    [
        ("WarmupLR", {"total_num_steps": 3}, "type WarmupLR has no parameter total_num_steps; it has warmup_min_lr"),
        ("cosine", {"warmup_type": "log"}, "type cosine has no parameter warmup_type"),
        ("OneCycle", {"cycle_max_lr": 1.0}, "type OneCycle needs cycle_min_lr"),
        ("OneCycle", {**CYCLE, "cycle_min_mom": 0.95}, "cycle_min_mom 0.95 is more than cycle_max_mom 0.9"),
        ("OneCycle", {**CYCLE, "cycle_max_mom": 1.0}, "cycle_max_mom: 1.0 should be less than 1"),
        ("OneCycle", {**CYCLE, "decay_mom_rate": 0.1}, "decay_mom_rate: 0.1 is not supported: momentum would grow past 1"),
        ("OneCycle", {**CYCLE, "last_batch_iteration": 5}, "last_batch_iteration: 5 is not supported: a checkpoint holds"),
        ("WarmupLR", {"warmup_type": "cubic"}, "warmup_type: 'cubic' should be 'log' or 'linear'"),
        ("WarmupLR", {"warmup_min_lr": 0.3}, "warmup_min_lr 0.3 is more than the optimizer's lr 0.2"),
        ("WarmupLR", {"warmup_min_lr": 0.3, "warmup_max_lr": 0.1}, "warmup_min_lr 0.3 is more than warmup_max_lr 0.1"),
        ("WarmupLr", {}, "scheduler.type: 'WarmupLr' should be 'constant', 'linear', 'cosine', 'WarmupLR'"),
    ],
)
def test_wrong_parameters_are_named(kind: str, params: dict[str, object], sentence: str) -> None:
    """A parameter of another type, a missing one, and values that contradict each other are errors with the numbers."""
    with pytest.raises(ConfigError) as caught:
        course(kind, **params)
    assert sentence in str(caught.value)
