"""What ranks do to single parameters: read and write their states, gather them, write into those that stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from kit import Kit, compute_dtype, kit_of, open_engine
from rank_checkpoints import Seen, rank_and_size, seen, take
from separate_device import install
from torch import nn

import infinity
from infinity import utils
from infinity.engine import Engine
from infinity.errors import InfinityError
from infinity.zero.absent import AbsentParameter

STATES = ("fp32", "exp_avg", "exp_avg_sq")


def pattern(parameter: nn.Parameter, state: str) -> torch.Tensor:
    """Return values that differ in every element and state, positive, and not exact in bf16."""
    start = 0.5 + STATES.index(state) / 7
    return (start + torch.arange(parameter.numel()) / (3 * parameter.numel())).view(parameter.shape) / 64


def require_equal(found: torch.Tensor | None, expected: torch.Tensor, what: str) -> None:
    assert found is not None, what
    assert found.dtype is torch.float32, what
    assert torch.equal(found, expected), what


def require_local(engine: Engine, local: torch.Tensor | None, full: torch.Tensor, what: str, *, is_split: bool) -> None:
    """Fail unless the ranks' parts one after the other, or each of them where it is the whole, are the full value."""
    assert local is not None, what
    lengths = [int(length) for length in engine.group.gather(local.numel(), what="lengths of local parts")]  # type: ignore[arg-type]
    assert sum(lengths) == full.numel() * (1 if is_split else len(lengths)), what
    start = sum(lengths[: engine.group.rank]) if is_split else 0
    require_equal(local, full.reshape(-1)[start : start + local.numel()], what)


def own_batches(kit: Kit, config: Mapping[str, Any], step: int) -> list[Any]:
    rank, size = rank_and_size()
    return kit.batches(step, 2 * size, compute_dtype(config))[2 * rank : 2 * rank + 2]


def touch_every_state(kit: str, config: Mapping[str, Any]) -> Seen:
    """Read and replace every master, moment and gradient in full and by parts, between steps; train on and return all."""
    is_split = config["zero_optimization"]["stage"] > 0
    with open_engine(kit_of(kit).build(), config) as engine:
        losses = take(engine, kit_of(kit), config, range(1))
        parameters = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
        for name, parameter in parameters:
            for state in STATES:
                _touch(engine, name, parameter, state, is_split=is_split)
        for name, value in engine.full_parameters():
            if dict(parameters).get(name) is not None:
                require_equal(value, pattern(dict(parameters)[name], "fp32") * 1.5, name)
        _replace_gradients(engine, kit_of(kit), config, is_split=is_split)
        losses += take(engine, kit_of(kit), config, range(2, 3))
        return seen(engine, losses, norm=engine.get_global_grad_norm())


def _touch(engine: Engine, name: str, parameter: nn.Parameter, state: str, *, is_split: bool) -> None:
    value, what = pattern(parameter, state), f"{state} of {name}"
    before = utils.safe_get_full_optimizer_state(parameter, state)
    assert before is not None, what
    require_local(engine, utils.safe_get_local_optimizer_state(parameter, state), before, what, is_split=is_split)
    utils.safe_set_full_optimizer_state(parameter, value, state)
    require_equal(utils.safe_get_full_optimizer_state(parameter, state), value, what)
    local = utils.safe_get_local_optimizer_state(parameter, state)
    require_local(engine, local, value, what, is_split=is_split)
    assert local is not None
    utils.safe_set_local_optimizer_state(parameter, local * 1.5, state)
    require_equal(utils.safe_get_full_optimizer_state(parameter, state), value * 1.5, what)
    if state == "fp32" and not isinstance(parameter, AbsentParameter):
        master = (value * 1.5).to(parameter.dtype)
        assert torch.allclose(parameter.detach().float(), master.float(), rtol=1e-2), what


def _replace_gradients(engine: Engine, kit: Kit, config: Mapping[str, Any], *, is_split: bool) -> None:
    """Double every gradient in full, and again by parts, and take the step."""
    for micro_batch in own_batches(kit, config, 1):
        engine.backward(engine(*micro_batch))
    for name, parameter in engine.module.named_parameters():
        gradient = utils.safe_get_full_grad(parameter)
        local = utils.safe_get_local_grad(parameter)
        if gradient is None:
            assert local is None, name
            continue
        assert gradient.shape == parameter.shape, name
        require_local(engine, local, gradient, name, is_split=is_split)
        utils.safe_set_full_grad(parameter, gradient * 2)
        require_equal(utils.safe_get_full_grad(parameter), gradient * 2, name)
        local = utils.safe_get_local_grad(parameter)
        assert local is not None
        utils.safe_set_local_grad(parameter, local * 2)
        require_equal(utils.safe_get_full_grad(parameter), gradient * 4, name)
    engine.step()


def errors_of(call: Callable[[], None]) -> str:
    try:
        call()
    except InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gather_and_write(kit: str, config: Mapping[str, Any]) -> Seen:
    """Write as a modifier rank, as another rank and without one; then into what stays in memory, on every rank."""
    rank, _ = rank_and_size()
    with open_engine(kit_of(kit).build(), config) as engine:
        losses = take(engine, kit_of(kit), config, range(1))
        parameters = dict(engine.module.named_parameters())
        with infinity.zero.GatheredParameters(list(parameters.values())):
            for name, parameter in parameters.items():
                master = utils.safe_get_full_fp32_param(parameter)
                assert master is not None
                assert torch.allclose(parameter.detach().float(), master, rtol=1e-2, atol=1e-6), name
        with infinity.zero.GatheredParameters(list(parameters.values()), modifier_rank=1), torch.no_grad():
            for parameter in parameters.values():
                written = pattern(parameter, "fp32").to(parameter.dtype)
                parameter.copy_(written if rank == 1 else torch.full_like(written, 7.0))
        for name, parameter in parameters.items():
            written = pattern(parameter, "fp32").to(parameter.dtype).float()
            require_equal(utils.safe_get_full_fp32_param(parameter), written, name)
        losses += take(engine, kit_of(kit), config, range(1, 2))
        _write_into_memory(engine)
        losses += take(engine, kit_of(kit), config, range(2, 3))
        return seen(engine, losses)


def _write_into_memory(engine: Engine) -> None:
    """Halve every parameter that is there to be written to, as every rank does; the master is exactly that then."""
    masters = {}
    for name, parameter in engine.module.named_parameters():
        master = utils.safe_get_full_fp32_param(parameter)
        assert master is not None
        if not isinstance(parameter, AbsentParameter):
            with torch.no_grad():
                parameter.mul_(0.5)
        else:
            with infinity.zero.GatheredParameters(parameter):
                weight = parameter.detach().clone()  # ties of the master are not rounded to even in it
            utils.safe_set_full_fp32_param(parameter, (weight * 0.5).float())
        masters[name] = (master, parameter)
    for name, (master, parameter) in masters.items():
        found = utils.safe_get_full_fp32_param(parameter)
        assert found is not None
        assert torch.allclose(found, master / 2, rtol=1e-2, atol=1e-6), name
        assert torch.equal(found, found.to(parameter.dtype).float()), name


def on_separate_device(work: Callable[..., Seen], kit: str, config: Mapping[str, Any]) -> Seen:
    """Do the work on a compute device with memory of its own, played by the CPU; its copies end as late as may be."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, late=True)
        return work(kit, config)


def write_against_the_rules(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said to a write without a modifier, on one rank alone, and to a modifier that there is not."""
    rank, _ = rank_and_size()
    with open_engine(kit_of("tiny-gpt").build(), config) as engine:
        parameter = engine.module.get_parameter("blocks.0.up.weight")

        def write_on_rank_1() -> None:
            with infinity.zero.GatheredParameters(parameter), torch.no_grad():
                if rank == 1:
                    parameter.add_(1.0)

        def write_as_rank_9() -> None:
            with infinity.zero.GatheredParameters(parameter, modifier_rank=9), torch.no_grad():
                parameter.add_(1.0)

        def write_as_nobody() -> None:
            with infinity.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
                if rank == 1:
                    parameter.add_(1.0)

        before = utils.safe_get_full_fp32_param(parameter)
        said = {"no modifier": errors_of(write_on_rank_1), "rank 9": errors_of(write_as_rank_9)}
        said["another rank"] = errors_of(write_as_nobody)
        after = utils.safe_get_full_fp32_param(parameter)
        assert before is not None
        require_equal(after, before, "nothing was kept")
        engine.train_batch(own_batches(kit_of("tiny-gpt"), config, 0))
        return said


def set_without_a_gradient(config: Mapping[str, Any]) -> dict[str, str]:
    """A branch that nobody used has no gradient on any rank; one that one rank alone used has it on all."""
    rank, _ = rank_and_size()
    with open_engine(kit_of("branchy").build(), config) as engine:
        for x, y, _ in own_batches(kit_of("branchy"), config, 0):
            engine.backward(engine(x, y, rank))
        found = {}
        for name, parameter in engine.module.named_parameters():
            gradient = utils.safe_get_full_grad(parameter)
            found[name] = "" if gradient is None else str(bool(gradient.abs().sum() > 0))
        parameter = engine.module.get_parameter("branches.2.weight")
        found["set"] = errors_of(lambda: utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape)))
        engine.step()
        return found


def build_under_init(config: Mapping[str, Any], seed_of_rank: list[int]) -> Seen:
    """Build under zero.Init with a seed of one's own on each rank."""
    with infinity.zero.Init(config_dict_or_path=config):
        model = kit_of("tiny-gpt").build(seed=seed_of_rank[rank_and_size()[0]])
    with open_engine(model, config) as engine:
        return seen(engine, [])
