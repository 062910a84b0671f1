"""The loop that users know: forward, backward and step in every order that torch allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import TINY_GPT, Run, TinyGpt, open_engine, require_same, require_same_state, settings, train, train_engine
from torch import nn

import infinity
from infinity.config import Config
from infinity.engine import Engine, EngineState
from infinity.errors import IllegalTransition, InfinityError

NVME = {"optim": "nvme", "params": "nvme"}


def step_familiarly(engine: Engine, step: int, num_micro_batches: int) -> tuple[float, ...]:
    losses = []
    for batch in TINY_GPT.batches(step, num_micro_batches, torch.bfloat16):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return tuple(losses)


def test_result_unpacks_as_users_expect(nvme: Path) -> None:
    """initialize returns an engine, an optimizer, no data loader and a schedule, as a tuple and by name."""
    result = infinity.initialize(model=TINY_GPT.build(), config=settings(nvme), activation_bytes=1 << 20)
    engine, optimizer, dataloader, lr_scheduler = result
    with engine:
        assert engine is result.engine
        assert optimizer is engine.optimizer
        assert dataloader is None
        assert lr_scheduler.get_last_lr() == [1e-2]
        assert engine.module.training


def test_configuration_may_be_a_dict_a_file_or_a_config(nvme: Path, tmp_path: Path) -> None:
    """A dict, the path of its JSON file and a Config give the same run."""
    import json

    config = settings(nvme, **NVME)
    (tmp_path / "config.json").write_text(json.dumps(config))
    runs = []
    for given in (config, tmp_path / "config.json", str(tmp_path / "config.json"), Config.from_any(config)):
        with infinity.initialize(model=TINY_GPT.build(), config=given, activation_bytes=1 << 20).engine as engine:
            runs.append(train_engine(engine, TINY_GPT, config, range(1)))
    for run in runs[1:]:
        require_same(run, runs[0])


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_loss_backward_is_engine_backward(tiers: tuple[str, str], nvme: Path) -> None:
    """loss.backward() and engine.backward(loss) do the same, mixed in one step."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=4)
    expected = train(TINY_GPT, config, num_steps=2)
    run = Run()
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            losses = []
            for number, batch in enumerate(TINY_GPT.batches(step, 4, torch.bfloat16)):
                loss = engine(*batch)
                loss.backward() if number % 2 else engine.backward(loss)
                losses.append(float(loss.detach()))
            engine.step()
            run.losses.append(tuple(losses))
        run.state = engine.state_dict()
    require_same(run, expected)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_step_before_the_boundary_does_nothing(tiers: tuple[str, str], nvme: Path) -> None:
    """step() counts only when every micro-batch has run backward; the boundary can be asked for."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=3)
    with open_engine(TINY_GPT.build(), config) as engine:
        engine.step()
        assert engine.global_steps == 0
        for number, batch in enumerate(TINY_GPT.batches(0, 3, torch.bfloat16)):
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(engine(*batch))
            assert engine.is_gradient_accumulation_boundary() == (number == 2)
            engine.step()
            assert engine.global_steps == (number == 2)
        assert engine.get_global_grad_norm() == engine.last_grad_norm
        assert engine.last_grad_norm is not None


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_forwards_first_then_backwards(tiers: tuple[str, str], nvme: Path) -> None:
    """Two forward passes, then their two backward passes: the sums are those of plain torch."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=False, num_micro_batches=2, lr=1e-3)
    model = TINY_GPT.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            batches = TINY_GPT.batches(step, 2)
            losses = [engine(*batch) for batch in batches]
            for loss in losses:
                engine.backward(loss)
            engine.step()
            (sum(model(*batch) for batch in batches) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        state = engine.state_dict()
    for name, value in model.state_dict().items():
        if not name.endswith("qkv.bias"):  # a bias of the keys has no gradient but rounding, which Adam makes large
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_a_forward_that_is_never_backpropagated_leaves_no_trace(tiers: tuple[str, str], nvme: Path) -> None:
    """An abandoned forward (its loss was looked at and dropped) counts for nothing: the step is the one without it."""
    config = settings(nvme, optim=tiers[0], params=tiers[1])
    expected = train(TINY_GPT, config, num_steps=2)
    run = Run()
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            engine(*TINY_GPT.batches(50 + step, 1, torch.bfloat16)[0])
            run.losses.append(step_familiarly(engine, step, 1))
        run.state = engine.state_dict()
    require_same(run, expected)


class TwoLosses(nn.Module):
    """Returns a loss and logits in a dict; both can be used."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGpt(tied=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        return {"loss": self.gpt(tokens, targets), "note": "kept", "tokens": tokens}


def test_outputs_keep_their_structure(nvme: Path) -> None:
    """What the module returns comes back as it is: same keys, same values, and the loss is differentiable."""
    batch = TINY_GPT.batches(0, 1)[0]
    with open_engine(TwoLosses(), settings(nvme, bf16=False, **NVME)) as engine:
        output = engine(*batch)
        assert set(output) == {"loss", "note", "tokens"}
        assert output["note"] == "kept"
        assert output["tokens"] is batch[0]
        engine.backward(output["loss"])
        engine.step()
        assert engine.global_steps == 1


def test_arithmetic_on_the_loss_counts(nvme: Path) -> None:
    """loss * 3 + 1 before backward triples the gradient, as in torch; the user may do with a loss what he likes."""
    norms = []
    for factor in (1.0, 3.0):
        with open_engine(TINY_GPT.build(), settings(nvme, bf16=False, **NVME)) as engine:
            engine.backward(engine(*TINY_GPT.batches(0, 1)[0]) * factor + 1)
            engine.step()
            norms.append(engine.last_grad_norm)
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-6)


def test_param_groups_set_the_hyper_parameters_of_the_next_step(nvme: Path) -> None:
    """weight_decay and betas of optimizer.param_groups may be changed between steps, as in torch.optim."""
    states = []
    for decay in (0.0, 0.5):
        with open_engine(TINY_GPT.build(), settings(nvme, bf16=False, weight_decay=0.0, **NVME)) as engine:
            engine.train_batch(TINY_GPT.batches(0, 1))
            engine.optimizer.param_groups[0]["weight_decay"] = decay
            engine.train_batch(TINY_GPT.batches(1, 1))
            states.append(engine.state_dict())
    name = "blocks.0.up.weight"
    shrunk = (states[0][name] - states[1][name]).sum() / states[0][name].sum()
    assert 0 < float(shrunk) < 0.02
    assert not torch.equal(states[0][name], states[1][name])


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_an_exception_in_the_model_discards_the_step(tiers: tuple[str, str], nvme: Path) -> None:
    """The user's own exception passes through; the engine is READY again and the next step is the one without it."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2)
    expected = train(TINY_GPT, config, num_steps=2)
    run = Run()
    with open_engine(TINY_GPT.build(), config) as engine:
        wrong = (torch.full((2, 32), 10_000), torch.zeros(2, 32, dtype=torch.long))
        for step in range(2):
            with pytest.raises(IndexError):
                engine.train_batch([TINY_GPT.batches(9, 1)[0], wrong])
            assert engine.state is EngineState.READY
            engine.backward(engine(*TINY_GPT.batches(9, 1, torch.bfloat16)[0]))
            with pytest.raises(IndexError):
                engine(*wrong)
            assert engine.state is EngineState.READY
            run.losses.append(step_familiarly(engine, step, 2))
        run.state = engine.state_dict()
    require_same(run, expected)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_an_exception_in_backward_discards_the_step(tiers: tuple[str, str], nvme: Path) -> None:
    """A hook of the user that raises leaves no half-summed gradient: the steps that follow are those without it."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], num_micro_batches=2)
    expected = train(TINY_GPT, config, num_steps=2)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    run = Run()
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            handle = engine.module.get_submodule("blocks.0").register_forward_hook(hook)
            loss = engine(*TINY_GPT.batches(9, 1, torch.bfloat16)[0])
            handle.remove()
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
            assert engine.state is EngineState.READY
            run.losses.append(step_familiarly(engine, step, 2))
        run.state = engine.state_dict()
    require_same(run, expected)


class FailsWhenRunAgain(nn.Module):
    """A layer whose second run, the one for backward, raises as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.failures_left = 0
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.failures_left and self.runs % 2 == 0:
            self.failures_left -= 1
            raise ZeroDivisionError
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("plainly", [True, False], ids=["loss.backward", "engine.backward"])
def test_a_failed_rerun_discards_the_step(plainly: bool, nvme: Path) -> None:
    """Whoever started it: step() takes no step from the part of a gradient that was summed, and the next is a clean one."""

    def run(num_failures: int) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(FailsWhenRunAgain() for _ in range(3)))
        config = settings(nvme, bf16=False, num_micro_batches=2, **NVME)
        with open_engine(model, config) as engine:
            for step in range(2):
                x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
                if step == 1 and num_failures:
                    model[0].runs, model[0].failures_left = 0, num_failures
                    loss = engine(x).square().mean()
                    with pytest.raises(ZeroDivisionError):
                        loss.backward() if plainly else engine.backward(loss)
                    engine.step()
                    assert engine.global_steps == 1
                for _ in range(2):
                    engine.backward(engine(x).square().mean())
                    engine.step()
            return engine.state_dict(), engine.global_steps

    state, num_steps = run(1)
    expected, _ = run(0)
    assert num_steps == 2
    require_same_state(state, expected)


def test_misuse_is_named(nvme: Path) -> None:
    """Each call that has no meaning in the engine's state is one sentence with a remedy, and changes nothing."""
    with open_engine(TINY_GPT.build(), settings(nvme, num_micro_batches=2, **NVME)) as engine:
        before = engine.state_dict()
        batch = TINY_GPT.batches(0, 1, torch.bfloat16)[0]
        with pytest.raises(IllegalTransition, match="no micro-batches"):
            engine.train_batch([])
        for wrong in (batch[0], {"tokens": batch[0]}, 3, None, "batch"):
            with pytest.raises(IllegalTransition, match=f"got a {type(wrong).__name__} instead of a list"):
                engine.train_batch(wrong)  # type: ignore[arg-type]
        with pytest.raises(IllegalTransition, match=r"engine\(\.\.\.\)"):
            engine.module(*batch)
        require_same_state(engine.state_dict(), before)
    with pytest.raises(IllegalTransition, match="CLOSED"):
        engine(*batch)
    for call in (
        lambda: engine.train_batch([batch]),
        engine.step,
        engine.synchronize,
        engine.state_dict,
        lambda: next(engine.full_parameters()),
        lambda: engine.save_checkpoint(nvme / "checkpoints"),
        lambda: engine.load_checkpoint(nvme / "checkpoints"),
    ):
        with pytest.raises(IllegalTransition, match="CLOSED"):
            call()
    engine.close()


def test_a_step_inside_a_step_is_refused(nvme: Path) -> None:
    """A module that calls its own engine in forward ends that step with a sentence; the next one is as if nothing was."""
    config = settings(nvme, **NVME)
    expected = train(TINY_GPT, config, num_steps=2)
    with open_engine(TINY_GPT.build(), config) as engine:
        batches = TINY_GPT.batches(0, 1, torch.bfloat16)
        handle = engine.module.get_submodule("blocks.1").register_forward_hook(lambda *_: engine.train_batch(batches))
        with pytest.raises(IllegalTransition, match="while the engine's own module runs"):
            engine.train_batch(batches)
        handle.remove()
        run = train_engine(engine, TINY_GPT, config, range(2))
    require_same(run, expected)


def test_micro_batches_may_come_from_a_generator(nvme: Path) -> None:
    """What a list gives, a generator of the same micro-batches gives, too."""
    losses = []
    for kind in (list, iter):
        with open_engine(TINY_GPT.build(), settings(nvme, num_micro_batches=2, **NVME)) as engine:
            losses.append(engine.train_batch(kind(TINY_GPT.batches(0, 2, torch.bfloat16))).losses)
    assert losses[0] == losses[1]


def test_a_second_backward_through_the_same_forward_is_refused(nvme: Path) -> None:
    """Backpropagating one loss twice is torch's own error or infinity's, never a gradient counted twice."""
    with open_engine(TINY_GPT.build(), settings(nvme, num_micro_batches=2, **NVME)) as engine:
        loss = engine(*TINY_GPT.batches(0, 1, torch.bfloat16)[0])
        engine.backward(loss)
        with pytest.raises((RuntimeError, InfinityError)):
            engine.backward(loss)


def test_random_state_of_the_user_is_left_alone(nvme: Path) -> None:
    """Training sets generators for its masks and gives the user's back: his own draws are those of a run without engine."""
    from kit import DROPOUT_GPT

    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with open_engine(DROPOUT_GPT.build(), settings(nvme, **NVME)) as engine:
        torch.set_rng_state(state)
        engine.train_batch(DROPOUT_GPT.batches(0, 1, torch.bfloat16))
        engine.backward(engine(*DROPOUT_GPT.batches(1, 1, torch.bfloat16)[0]))
        engine.step()
        assert torch.equal(torch.rand(4), expected)


def test_micro_batches_may_be_dicts_tuples_or_tensors(nvme: Path) -> None:
    """A dict gives keyword arguments, a tuple positional ones, with the same bits; one tensor is one argument."""
    states = []
    tokens, targets = TINY_GPT.batches(0, 1)[0]
    for batch in ((tokens, targets), [tokens, targets], {"targets": targets, "tokens": tokens}):
        with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
            engine.train_batch([batch])
            states.append(engine.state_dict())
    require_same_state(states[1], states[0])
    require_same_state(states[2], states[0])
    model = nn.Sequential(nn.Linear(4, 4))
    with open_engine(model, settings(nvme, bf16=False, **NVME)) as engine:
        assert (
            engine.train_batch([torch.ones(2, 4)], loss_fn=lambda output, batch: (output - batch).square().mean()).loss > 0
        )
