"""Evaluation between and inside steps, units that are not called in every step, and units that are never called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit import (
    BRANCHY,
    TINY_GPT,
    Branchy,
    Kit,
    MicroBatch,
    TinyGpt,
    open_engine,
    require_same,
    settings,
    train,
    train_engine,
)

from infinity.engine import Engine

TIERS = [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")]


def partly_frozen() -> TinyGpt:
    """Tied embedding, first block and last norm frozen, dropout on."""
    model = TinyGpt(dropout=0.1, num_layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("blocks.0", "norm")))
    return model


FROZEN_GPT = Kit("partly-frozen", partly_frozen, TINY_GPT.micro_batch)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    engine.eval()
    with torch.no_grad():
        yield
    engine.train()


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_evaluation_leaves_no_trace(tiers: tuple[str, str], bf16: bool, schedule: str, nvme: Path) -> None:
    """C94: train 5, evaluate 2, train 5 equals ten steps without; tied and partly frozen, with dropout."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=bf16, num_micro_batches=2, schedule=schedule)
    dtype = torch.bfloat16 if bf16 else torch.float32
    expected = train(FROZEN_GPT, config, num_steps=10)
    with open_engine(FROZEN_GPT.build(), config) as engine:
        first = train_engine(engine, FROZEN_GPT, config, range(5))
        with evaluating(engine):
            evaluated = [float(engine(*batch)) for batch in FROZEN_GPT.batches(100, 2, dtype)]
        again = train_engine(engine, FROZEN_GPT, config, range(5, 10))
    again.losses = first.losses + again.losses
    require_same(again, expected)
    assert len(set(evaluated)) == 2
    initial = FROZEN_GPT.build().state_dict()
    rounded = {name: value.to(dtype).float() for name, value in initial.items()}
    assert torch.equal(again.state["blocks.0.up.weight"], rounded["blocks.0.up.weight"])
    assert not torch.equal(again.state["blocks.1.up.weight"], rounded["blocks.1.up.weight"])


def test_evaluation_equals_plain_torch(nvme: Path) -> None:
    """Evaluated on NVMe in fp32, a trained model gives the loss of a plain module with the same weights, bit for bit."""
    config = settings(nvme, optim="nvme", params="nvme", bf16=False)
    with open_engine(FROZEN_GPT.build(), config) as engine:
        train_engine(engine, FROZEN_GPT, config, range(3))
        with evaluating(engine):
            losses = [engine(*batch) for batch in FROZEN_GPT.batches(50, 3)]
        state = engine.state_dict()
    plain = FROZEN_GPT.build().eval()
    plain.load_state_dict(state)
    assert [float(plain(*batch).detach()) for batch in FROZEN_GPT.batches(50, 3)] == [float(loss) for loss in losses]
    assert not any(loss.requires_grad for loss in losses)


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_evaluation_between_micro_batches(tiers: tuple[str, str], how: str, nvme: Path) -> None:
    """C94: evaluated between the micro-batches of one step of the familiar loop, in each way that torch has: no trace."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2)
    expected = train(TINY_GPT, config, num_steps=2)
    with open_engine(TINY_GPT.build(), config) as engine:
        losses = []
        for step in range(2):
            for batch in TINY_GPT.batches(step, 2, torch.bfloat16):
                loss = engine(*batch)
                engine.backward(loss)
                losses.append(float(loss.detach()))
                evaluate(engine, how, batch)
                engine.step()
        run = train_engine(engine, TINY_GPT, config, ())
    run.losses = [tuple(losses[:2]), tuple(losses[2:])]
    require_same(run, expected)


def evaluate(engine: Engine, how: str, batch: MicroBatch) -> None:
    if how == "eval":
        engine.eval()
        assert not engine(*batch).requires_grad  # evaluation keeps no graph, whether or not the user says no_grad
        engine.train()
        return
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        engine(*batch)


def branch_by_draw(generator: torch.Generator, step: int) -> MicroBatch:
    """Each micro-batch chooses its own branch."""
    x, y, _ = BRANCHY.micro_batch(generator, step)
    return x, y, int(torch.randint(2, (), generator=generator))


MIXED_BRANCHES = Kit("mixed-branches", Branchy, branch_by_draw)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("tiers", [*TIERS, ("cpu", "nvme")], ids="-".join)
@pytest.mark.parametrize("kit", [BRANCHY, MIXED_BRANCHES], ids=lambda kit: kit.name)
def test_branches_change_from_step_to_step(kit: Kit, tiers: tuple[str, str], num_micro_batches: int, nvme: Path) -> None:
    """C93: what was loaded ahead for the other branch costs speed only: eight steps as plain torch takes them.

    A parameter without a gradient in a step keeps weight, moments and its own step count, as in torch; the third branch is
    never called and keeps every bit in spite of weight decay.
    """
    config = settings(
        nvme, optim=tiers[0], params=tiers[1], bf16=False, num_micro_batches=num_micro_batches, weight_slots=2, lr=1e-3
    )
    model = kit.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    with open_engine(kit.build(), config) as engine:
        for step in range(8):
            result = engine.train_batch(kit.batches(step, num_micro_batches))
            losses = []
            for batch in kit.batches(step, num_micro_batches):
                loss = model(*batch)
                (loss / num_micro_batches).backward()
                losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert result.losses == pytest.approx(losses, rel=1e-5)
        state = engine.state_dict()
        steps = dict(engine.optimizer.steps)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-6)
        assert steps.get(name, 0) == int(optimizer.state[parameter]["step"] if parameter in optimizer.state else 0), name
    initial = kit.build().state_dict()
    for name in ("branches.2.weight", "branches.2.bias"):
        assert torch.equal(state[name], initial[name])


def test_a_forward_pass_before_the_first_step_does_not_cost_the_tail(nvme: Path) -> None:
    """A training pass to look at shapes learns no tail: train_batch learns it all the same, and gives the same bits."""
    config = settings(nvme, optim="nvme", params="nvme", num_micro_batches=2)
    expected = train(TINY_GPT, config, num_steps=2)
    with open_engine(TINY_GPT.build(), config) as engine:
        engine(*TINY_GPT.batches(7, 1, torch.bfloat16)[0])
        engine.zero_grad()
        assert engine._parts.order.known
        assert engine._parts.order.tail is None
        require_same(train_engine(engine, TINY_GPT, config, range(2)), expected)
        assert engine._parts.order.tail is not None


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_untouched_parameters_keep_moments_too(bf16: bool, nvme: Path, tmp_path: Path) -> None:
    """After a step in which its branch is not taken, every stored plane of a parameter has the bits of before."""
    from infinity.checkpoint.reader import open_checkpoint

    config = settings(nvme, optim="nvme", params="nvme", bf16=bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    with open_engine(BRANCHY.build(), config) as engine:
        for step in (0, 1, 2):  # the branches 0, 1, 0
            engine.train_batch(BRANCHY.batches(step, 1, dtype))
        before = engine.save_checkpoint(tmp_path / "before")
        engine.train_batch(BRANCHY.batches(4, 1, dtype))  # 0 again
        after = engine.save_checkpoint(tmp_path / "after")
    planes = ("weight", "exp_avg", "exp_avg_sq", *(("master_low",) if bf16 else ()))
    for name in ("branches.0.weight", "branches.1.weight", "branches.2.bias"):
        for kind in planes:
            values = []
            for path in (before, after):
                with open_checkpoint(path) as checkpoint:
                    spec = dict(checkpoint.specs(kind))[name]
                    into = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype))
                    checkpoint.read(name, kind, 0, spec.numel, into)
                    values.append(into)
            assert torch.equal(*values) == (name != "branches.0.weight"), (name, kind)
