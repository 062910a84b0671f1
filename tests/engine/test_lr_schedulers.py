"""Schedulers in the engine: DeepSpeed's by name and torch's as objects move lr and momentum with the applied steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import ODD_MLP, TINY_GPT, Kit, open_engine, require_same_state, settings
from test_skipped_steps import KIT as POISONED
from test_skipped_steps import poisoned
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from infinity.engine import initialize
from infinity.errors import ConfigError

KIT, LR, NUM_STEPS = ODD_MLP, 0.01, 6
NVME = {"optim": "nvme", "params": "nvme"}
Make = Callable[[torch.optim.Optimizer], LRScheduler]
MAKERS: dict[str, Make] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=NUM_STEPS),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=NUM_STEPS),
}


def config(nvme: Path, scheduler: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return settings(nvme, lr=LR, bf16=False, scheduler=scheduler or {}, **NVME, **options)


def opened(nvme: Path, scheduler: LRScheduler | Make, kit: Kit = KIT) -> Any:
    return initialize(model=kit.build(), config=config(nvme), lr_scheduler=scheduler).engine


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, foreach=False)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("error")
def test_a_scheduler_of_torch_moves_what_it_moves_in_torch(name: str, nvme: Path) -> None:
    """C63, C80: lr and betas of each step are bit for bit those of the same scheduler over torch's AdamW; weights follow."""
    model = KIT.build()
    optimizer = adamw(model)
    scheduler = MAKERS[name](optimizer)
    with opened(nvme, MAKERS[name]) as engine:
        for step in range(NUM_STEPS - 1):
            group = optimizer.param_groups[0]
            assert engine.train_batch(KIT.batches(step, 1)).lr == group["lr"]
            assert engine.optimizer.param_groups[0]["betas"] == tuple(group["betas"])
            model(*KIT.batches(step, 1)[0]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        state = engine.state_dict()
    for parameter, expected in model.state_dict().items():
        torch.testing.assert_close(state[parameter], expected, rtol=2e-4, atol=1e-5)


def test_a_scheduler_object_keeps_its_own_optimizer(nvme: Path) -> None:
    """A scheduler that was made before is stepped once for each applied step; its optimizer's own weights stay."""
    held = torch.nn.Parameter(torch.ones(3))
    scheduler = StepLR(torch.optim.AdamW([held], lr=0.5), step_size=2, gamma=0.5)
    with opened(nvme, scheduler) as engine:
        rates = [engine.train_batch(KIT.batches(step, 1)).lr for step in range(5)]
        assert engine.lr_scheduler.get_last_lr() == [0.125]
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.125]
    assert scheduler.last_epoch == 5
    assert held.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", [*MAKERS, "OneCycle"])
def test_a_resumed_schedule_goes_on_where_it_was(name: str, nvme: Path, tmp_path: Path) -> None:
    """Saved after step 3: a new engine, and one that is ahead, go on with the same lr and weights bit for bit."""
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}}

    def engine_of() -> Any:
        return opened(nvme, MAKERS[name]) if name in MAKERS else open_engine(KIT.build(), config(nvme, cycle))

    with engine_of() as engine:
        for step in range(3):
            engine.train_batch(KIT.batches(step, 1))
        engine.save_checkpoint(tmp_path)
        expected = [engine.train_batch(KIT.batches(step, 1)).lr for step in range(3, 6)]
        state = engine.state_dict()
        engine.load_checkpoint(tmp_path)
        assert [engine.train_batch(KIT.batches(step, 1)).lr for step in range(3, 6)] == expected
        require_same_state(engine.state_dict(), state)
    with engine_of() as engine:
        engine.load_checkpoint(tmp_path)
        assert [engine.train_batch(KIT.batches(step, 1)).lr for step in range(3, 6)] == expected
        require_same_state(engine.state_dict(), state)


@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_skipped_step_moves_no_schedule(is_torchs: bool, nvme: Path) -> None:
    """The step after a gradient that is not finite uses the learning rate that the skipped one had."""
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}}
    engine = opened(nvme, MAKERS["lambda"], POISONED) if is_torchs else open_engine(POISONED.build(), config(nvme, warmup))
    with engine:
        results = [
            engine.train_batch(poisoned(POISONED.batches(0, 1), factor)) for factor in (1.0, float("nan"), float("nan"), 1.0)
        ]
    assert [result.skipped for result in results] == [False, True, True, False]
    first, second, third, fourth = (result.lr for result in results)
    assert first != second == third == fourth


def test_momentum_of_one_cycle_reaches_the_update(nvme: Path) -> None:
    """OneCycle writes the first beta of the step and leaves the second; switched off, both are the configured ones."""
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_min_mom": 0.5}
    states = []
    for momentum in (True, False):
        cycle = {"type": "OneCycle", "params": {**params, "cycle_momentum": momentum}}
        with open_engine(KIT.build(), config(nvme, cycle)) as engine:
            seen = []
            for step in range(3):
                engine.train_batch(KIT.batches(step, 1))
                seen.append(engine.optimizer.param_groups[0]["betas"])
            states.append(engine.state_dict())
        assert [betas[1] for betas in seen] == [0.999] * 3
        assert [betas[0] for betas in seen] == pytest.approx([0.9, 0.7, 0.5] if momentum else [0.9] * 3)
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_what_is_no_scheduler_is_refused(nvme: Path) -> None:
    """Values, functions that give something else, schedulers on a metric and over other groups are named."""
    two = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}], lr=0.1)
    for given, sentence in (
        (3, "int is neither a scheduler of torch nor a function"),
        (lambda optimizer: 3, "int cannot be stepped once for each applied step"),
        (ReduceLROnPlateau, "ReduceLROnPlateau cannot be stepped"),
        (StepLR(two, 1), "it moves 2 parameter groups, the engine has 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            initialize(model=KIT.build(), config=config(nvme), lr_scheduler=given)  # type: ignore[arg-type]


def test_a_section_beside_a_scheduler_is_said(nvme: Path) -> None:
    """A configuration with a scheduler and an lr_scheduler: the argument counts, and a note says so."""
    named = config(nvme, {"type": "WarmupLR"})
    with initialize(model=KIT.build(), config=named, lr_scheduler=MAKERS["lambda"]).engine as engine:
        assert engine.lr == LR
        assert "scheduler: has no effect because initialize was given an lr_scheduler." in engine.notes


def test_a_warm_up_may_be_given_by_group(nvme: Path) -> None:
    """A list has one number for each group: each group rises to its own, also where the other bound is one for all."""
    config = settings(nvme, bf16=False, scheduler={"type": "WarmupLR", "params": {}})
    config["scheduler"]["params"] = {"warmup_min_lr": 0.001, "warmup_max_lr": [0.1, 0.01], "warmup_num_steps": 4}
    model = TINY_GPT.build()
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": matrices}, {"params": vectors}]
    with open_engine(model, config, model_parameters=groups) as engine:
        seen = []
        for step in range(6):
            seen.append(engine.get_lr())
            engine.train_batch(TINY_GPT.batches(step, 1))
            assert [group["lr"] for group in engine.optimizer.param_groups] == seen[-1]
    shares = [math.log(step + 1) / math.log(4) for step in range(4)] + [1.0, 1.0]
    assert seen == [pytest.approx([0.001 + 0.099 * share, 0.001 + 0.009 * share]) for share in shares]


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "LRRangeTest"])
def test_a_list_of_another_length_is_refused(kind: str, nvme: Path) -> None:
    """Two numbers for one group: initialize says how many there are; what contradicts another list is said by the parser."""
    name = "lr_range_test_min_lr" if kind == "LRRangeTest" else "warmup_max_lr"
    scheduler = {"type": kind, "params": {name: [0.1, 0.2], **({"total_num_steps": 9} if "Decay" in kind else {})}}
    with pytest.raises(ConfigError, match=f"{name} has 2 numbers; there are 1 parameter groups"):
        open_engine(TINY_GPT.build(), settings(nvme, scheduler=scheduler))
    for wrong in ([], [0.1, -0.1], [0.1, "x"], "x", [[0.1]]):
        with pytest.raises(ConfigError, match=name):
            open_engine(TINY_GPT.build(), settings(nvme, scheduler={"type": kind, "params": {name: wrong}}))
    both = {"warmup_min_lr": [0.0, 0.3], "warmup_max_lr": [0.1, 0.2]}
    with pytest.raises(ConfigError, match=r"warmup_min_lr 0\.3 is more than warmup_max_lr 0\.2"):
        open_engine(TINY_GPT.build(), settings(nvme, scheduler={"type": "WarmupLR", "params": both}))
