"""Conformance checks of gradients, states and learning rates, step by step: each compares every element with plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from conformance import LR, STATES, Twins, require_close
from conformance_backward import seeded
from kit import BRANCHY, Branchy, LoraGpt, MicroBatch, OddMlp, TinyGpt, compute_dtype, kit_of
from torch import nn

import infinity
from infinity import utils
from infinity.optim.hyper import AdamHyper
from infinity.optim.reference import adam_update_


class Gpt(TinyGpt):
    """A tied decoder without biases of keys, whose gradients are rounding alone, which Adam makes large."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.qkv = nn.Linear(48, 3 * 48, bias=False)


class PartlyFrozen(Gpt):
    """The same with its first block and its last norm frozen."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.blocks[0], self.norm):
            part.requires_grad_(False)


MODELS = {"odd-mlp": OddMlp, "tiny-gpt": Gpt, "lora-gpt": LoraGpt}  # odd sizes and a scalar; tied; frozen


def exact_gradients(nvme: str, *, model: str, **job: Any) -> None:
    """Two steps of two micro-batches on every rank: all gradients, masters and moments, element by element."""
    with Twins(seeded(MODELS[model]), nvme, num_micro_batches=2, **job) as twins:
        for step in range(2):
            train_one_step(twins, kit_of(model).batches, step)
        twins.require_same_states()


def train_one_step(twins: Twins, draw: Any, step: int) -> None:
    """Run both sides up to the same gradients, and take the step."""
    own, everybodys = twins.batches(draw, step)
    for batch in own:
        twins.engine.backward(twins.engine(*batch))
    for batch in everybodys:
        (twins.plain(*batch) / twins.num_in_step).backward()
    twins.require_same_gradients()
    twins.step()


def alternating(step: int, num: int, dtype: torch.dtype) -> list[MicroBatch]:
    """Return micro-batches of Branchy that choose branches 0 and 1 in turn, or all of them branch 1 in every third step."""
    return [
        (*batch[:2], 1 if step % 3 == 2 else (number + step) % 2)
        for number, batch in enumerate(BRANCHY.batches(step, num, dtype))
    ]


def unbalanced_gradients(nvme: str, **job: Any) -> None:
    """Each rank's micro-batches take other branches: one rank's gradient counts; the third branch keeps every bit."""
    with Twins(seeded(Branchy), nvme, **job) as twins:
        initial = twins.masters()
        for step in range(6):
            train_one_step(twins, alternating, step)
        twins.require_same_states()
        final = twins.masters()
        for name in ("branches.2.weight", "branches.2.bias"):
            assert torch.equal(final[name], initial[name])
        for name, parameter in twins.plain.named_parameters():
            taken = twins.optimizer.state.get(parameter, {}).get("step", 0)
            assert twins.engine.optimizer.steps.get(name, 0) == int(taken), name


def edited_states(nvme: str, **job: Any) -> None:
    """Full and local gradients, masters and moments are read as written, and the step goes on from what was written."""
    with Twins(seeded(OddMlp), nvme, **job) as twins:
        train_one_step(twins, kit_of("odd-mlp").batches, 0)
        weight, plain = (side.get_parameter("first.weight") for side in (twins.engine.module, twins.plain))
        bias, plain_bias = (side.get_parameter("second.bias") for side in (twins.engine.module, twins.plain))
        master = utils.safe_get_full_fp32_param(weight)
        assert master is not None
        utils.safe_set_full_fp32_param(weight, master * 1.5)
        utils.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 1e-3), "exp_avg")
        local = utils.safe_get_local_optimizer_state(weight, "exp_avg_sq")
        assert local is not None
        utils.safe_set_local_optimizer_state(weight, torch.full_like(local, 1e-4), "exp_avg_sq")
        with torch.no_grad():
            plain.copy_(master * 1.5)
            twins.optimizer.state[plain]["exp_avg"].fill_(1e-3)
            twins.optimizer.state[plain]["exp_avg_sq"].fill_(1e-4)
        twins.require_same_states()
        local_master = utils.safe_get_local_fp32_param(weight)
        assert local_master is not None
        assert utils.safe_get_local_optimizer_state(weight, "exp_avg").numel() == local_master.numel()  # type: ignore[union-attr]
        twins.make_equal()  # rounding alone: edits are compared from equal masters
        own, everybodys = twins.batches(kit_of("odd-mlp").batches, 1)
        twins.engine.backward(twins.engine(*own[0]))
        for batch in everybodys:
            (twins.plain(*batch) / twins.num_in_step).backward()
        halved = utils.safe_get_full_grad(weight)
        assert halved is not None
        utils.safe_set_full_grad(weight, halved * 0.5)
        local = utils.safe_get_local_grad(bias)
        assert local is not None
        utils.safe_set_local_grad(bias, torch.zeros_like(local))
        assert plain.grad is not None
        assert plain_bias.grad is not None
        plain.grad.mul_(0.5)
        plain_bias.grad.zero_()
        utils.safe_update_full_grad_vectorized([weight, bias], lambda gradient, parameter: gradient * parameter.dim())
        plain.grad.mul_(2)
        twins.require_same_gradients()
        norm = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in twins.plain.parameters()]))
        twins.step()
        assert math.isclose(twins.engine.get_global_grad_norm() or 0.0, norm, rel_tol=1e-5)
        twins.require_same_states()


def poisoned(batch: Sequence[torch.Tensor]) -> MicroBatch:
    """Return the micro-batch with an infinite input."""
    x, *rest = batch
    return x.clone().index_fill_(0, torch.tensor(0), math.inf), *rest


def one_rank_overflows(nvme: str, **job: Any) -> None:
    """The last rank's gradient is not finite in step 1: no rank applies it; states, learning rate and counts stay."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": LR}}
    with Twins(seeded(OddMlp), nvme, scheduler=scheduler, **job) as twins:
        engine, rates, norms = twins.engine, [], []
        for step in range(4):
            own, _ = twins.batches(kit_of("odd-mlp").batches, step)
            is_bad = step == 1 and engine.global_rank == engine.world_size - 1
            before = twins.masters()
            rates.append(engine.get_lr()[0])
            engine.backward(engine(*(poisoned(own[0]) if is_bad else own[0])))
            engine.step()
            norms.append(engine.get_global_grad_norm())
            assert engine.was_step_applied() == (step != 1)
            if step == 1:
                after = twins.masters()
                assert all(torch.equal(after[name], value) for name, value in before.items())
                assert set(engine.optimizer.steps.values()) == {1}
        assert [math.isfinite(norm or 0.0) for norm in norms] == [True, False, True, True]
        assert (engine.global_steps, engine.skipped_steps) == (4, 1)
        assert set(engine.optimizer.steps.values()) == {3}
        shares = [0.0, math.log(2) / math.log(4), math.log(2) / math.log(4), math.log(3) / math.log(4)]
        for rate, share in zip(rates, shares, strict=True):
            assert math.isclose(rate, LR * share, abs_tol=1e-12)


def loss_scale_sequence(nvme: str, **job: Any) -> None:
    """The scale of each step by window and hysteresis, with overflows of the last rank: the same on every rank."""
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 1}
    bad_steps, scales = (1, 2, 5), []
    with Twins(seeded(OddMlp), nvme, fp16=fp16, **job) as twins:
        engine = twins.engine
        for step in range(8):
            (batch,), _ = twins.batches(kit_of("odd-mlp").batches, step)
            is_bad = step in bad_steps and engine.global_rank == engine.world_size - 1
            engine.backward(engine(*(poisoned(batch) if is_bad else batch)))
            engine.step()
            scales.append(engine.loss_scale)
        assert engine.skipped_steps == 3
    # Step 1 uses up one of the hysteresis, step 2 halves; two finite steps double and give the hysteresis back; step 5 uses
    # up one of it and begins the window anew.
    assert scales == [256.0, 256.0, 128.0, 128.0, 256.0, 256.0, 256.0, 512.0]


def norm_over_a_change_of_scale(nvme: str, **job: Any) -> None:
    """In steps whose scale differs the norm is that of the unscaled gradient, and so is the gradient that users read."""
    with Twins(seeded(OddMlp), nvme, fp16={"initial_scale_power": 4, "loss_scale_window": 1}, **job) as twins:
        engine = twins.engine
        for step in range(4):
            (batch,), everybodys = twins.batches(kit_of("odd-mlp").batches, step)
            assert engine.loss_scale == 16.0 * 2**step
            engine.backward(engine(*batch))
            reference = seeded(OddMlp)()
            reference.load_state_dict(engine_weights(engine))
            for batch in everybodys:
                (reference(*(part.float() for part in batch)) / twins.num_in_step).backward()
            squares = 0.0
            for name, parameter in engine.module.named_parameters():
                expected = reference.get_parameter(name).grad
                assert expected is not None
                squares += float(expected.double().square().sum())
                require_close(utils.safe_get_full_grad(parameter), expected, name, 0.02, 1e-3)
            engine.step()
            assert math.isclose(engine.get_global_grad_norm() or 0.0, squares**0.5, rel_tol=5e-3)


def engine_weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    """Return the weights that forward uses, in fp32, by parameter name."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with infinity.zero.GatheredParameters(parameter):
            found[name] = parameter.detach().clone().float()
    return found


def evaluation_in_between(nvme: str, **job: Any) -> None:
    """Five steps, two evaluations, five steps: every element is that of ten steps of plain torch without any."""
    with Twins(seeded(PartlyFrozen), nvme, **job) as twins:
        draw = kit_of("tiny-gpt").batches
        for step in range(10):
            if step == 5:
                for number in range(2):
                    batch = draw(100 + number, 1, compute_dtype(twins.config))[0]
                    twins.engine.eval()
                    loss = twins.engine(*batch)
                    twins.engine.train()
                    with torch.no_grad():
                        require_close(loss, twins.plain(*batch), "loss", 1e-5, 1e-6)
            train_one_step(twins, draw, step)
        twins.require_same_states(atol=1e-4)


def gathered_writes(nvme: str, **job: Any) -> None:
    """`p.mul_(0.5)` over all parameters, and an average kept beside them: writes persist, training goes on from them."""
    with Twins(seeded(OddMlp), nvme, **job) as twins:
        draw = kit_of("odd-mlp").batches
        train_one_step(twins, draw, 0)
        twins.make_equal()
        average = {name: torch.zeros(parameter.shape) for name, parameter in twins.plain.named_parameters()}
        with infinity.zero.GatheredParameters(twins.engine.module.parameters(), modifier_rank=0), torch.no_grad():
            for name, parameter in twins.engine.module.named_parameters():
                average[name].lerp_(parameter.float(), 0.1)
                if twins.engine.global_rank == 0:
                    parameter.mul_(0.5)
        with torch.no_grad():
            for name, parameter in twins.plain.named_parameters():
                assert torch.equal(average[name], torch.zeros(parameter.shape).lerp_(parameter, 0.1))
                parameter.mul_(0.5)
        for name, value in twins.masters().items():
            assert torch.equal(value, twins.plain.get_parameter(name).detach()), name
        train_one_step(twins, draw, 1)
        twins.require_same_states()


def learning_rates(nvme: str, **job: Any) -> list[list[float]]:
    """Return lr of each of six steps, two groups, warm-up and decay: a matter of applied steps alone."""
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 3, "total_num_steps": 6, "warmup_max_lr": [0.1, 0.2]},
    }
    model = seeded(OddMlp)()
    model.temperature.requires_grad_(False)
    groups = [{"params": list(model.first.parameters())}, {"params": [*model.second.parameters(), *model.head.parameters()]}]
    rates = []
    with Twins(lambda: model, nvme, scheduler=scheduler, options={"model_parameters": groups}, **job) as twins:
        for step in range(6):
            rates.append(twins.engine.get_lr())
            (batch,), _ = twins.batches(kit_of("odd-mlp").batches, step)
            twins.engine.backward(twins.engine(*batch))
            twins.engine.step()
            assert [group["lr"] for group in twins.engine.optimizer.param_groups] == rates[-1]
    return rates


def long_run_in_bf16(nvme: str, **job: Any) -> None:
    """320 bf16 steps: every step count is that whole number, and the last update has its bias corrections, bit for bit.

    A counter in bf16 would have stopped at 256.
    """
    num_steps = 320
    with Twins(seeded(Square), nvme, bf16=True, **job) as twins:
        engine, weight = twins.engine, twins.engine.module.get_parameter("layer.weight")
        generator = torch.Generator().manual_seed(1 + engine.global_rank)
        for _ in range(num_steps):
            engine.backward(engine(torch.randn(4, 16, generator=generator).bfloat16()))
            before = [utils.safe_get_full_optimizer_state(weight, state) for state in ("fp32", *STATES)]
            gradient = utils.safe_get_full_grad(weight)
            engine.step()
        assert engine.optimizer.steps == {"layer.weight": num_steps, "layer.bias": num_steps}
        after = [utils.safe_get_full_optimizer_state(weight, state) for state in ("fp32", *STATES)]
        for count in (num_steps, 256):
            hyper = AdamHyper(LR, 0.9, 0.999, 1e-8, 0.1, count, decoupled=True)
            expected = [value.clone() for value in before if value is not None]
            assert gradient is not None
            adam_update_(*expected, gradient, hyper, 1.0)
            same = all(torch.equal(ours, theirs) for ours, theirs in zip(after, expected, strict=True) if ours is not None)
            assert same == (count == num_steps)


class Square(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().square().mean()
