"""Optimizers of torch, named in the configuration or given to initialize, against the same ones by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BRANCHY,
    BULK,
    ODD_MLP,
    TINY_GPT,
    Kit,
    open_engine,
    require_same,
    settings,
    train,
    train_familiarly,
)
from torch import nn

import infinity
from infinity.config.optimizer import NATIVE_TYPES, PARAMS_OF_TYPE, OptimizerSection
from infinity.engine import Engine
from infinity.engine.groups import groups_of
from infinity.errors import CheckpointError, CheckpointMismatch, ConfigError, DoesNotFit, ModelError
from infinity.optim.lion import Lion
from infinity.placement import Owner, Placement
from infinity.store.layout import ParameterSpec
from infinity.store.unit_size import UnitLayouts, unit_layouts

# Of each type parameters that use all that it can do.
PARAMS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.01},
    "Adamax": {"lr": 2e-3},
    "NAdam": {"lr": 2e-3, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"lr": 1e-3},
    "ASGD": {"lr": 0.02, "t0": 1.0},
    "Rprop": {"lr": 1e-3},
}


def kind_of(name: str) -> Any:
    return Lion if name == "Lion" else getattr(torch.optim, name)


def config(nvme: Path, name: str, hyper: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**settings(nvme, bf16=False, **options), "optimizer": {"type": name, "params": hyper}}


def differing(engine: Engine, model: nn.Module) -> list[str]:
    ours = engine.state_dict()
    return [name for name, value in model.state_dict().items() if not torch.equal(ours[name], value)]


def step_with_torch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], coefficient: float) -> None:
    for batch in batches:
        (model(*batch) / len(batches)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)
    optimizer.step()
    optimizer.zero_grad()


def test_every_type_of_the_configuration_is_tried() -> None:
    """C66: what the section optimizer takes beside infinity's own Adam is what these tests train with."""
    assert set(PARAMS) | set(NATIVE_TYPES) == set(PARAMS_OF_TYPE)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("name", PARAMS)
def test_fp32_has_torchs_bits(name: str, clip: float, num_micro_batches: int, nvme: Path) -> None:
    """C66, C62: every advertised type, with and without clipping and accumulation, gives torch's own weights bit for bit."""
    model = BRANCHY.build()
    optimizer = kind_of(name)(model.parameters(), **PARAMS[name])
    options = config(nvme, name.upper(), PARAMS[name], clip=clip, num_micro_batches=num_micro_batches)
    with open_engine(BRANCHY.build(), options) as engine:
        for step in range(4):  # each leaves out one branch, and one is never used
            result = engine.train_batch(BRANCHY.batches(step, num_micro_batches))
            assert (result.clip_coefficient < 1) == (clip > 0)
            step_with_torch(model, optimizer, BRANCHY.batches(step, num_micro_batches), result.clip_coefficient)
        assert differing(engine, model) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_an_fp32_master(precision: str, nvme: Path) -> None:
    """Gradients are rounded once, the master is torch's in fp32, and the weights are its rounding to nearest even."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model, masters = ODD_MLP.build().to(dtype), ODD_MLP.build()
    optimizer = torch.optim.SGD(masters.parameters(), **PARAMS["SGD"])
    fp16 = {"loss_scale": 8.0} if precision == "fp16" else None
    options = {**settings(nvme, clip=0.0, fp16=fp16), "optimizer": {"type": "SGD", "params": PARAMS["SGD"]}}
    with torch.no_grad():
        for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
            weight.copy_(master)
    with open_engine(ODD_MLP.build(), options) as engine:
        for step in range(4):
            [batch] = ODD_MLP.batches(step, 1, dtype)
            scale = engine.loss_scale
            engine.train_batch([batch])
            (model(*batch) * scale).backward()
            for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float() * (1 / scale)
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
                    weight.copy_(master)
            model.zero_grad()
        assert differing(engine, masters) == []
        for (name, weight), ours in zip(model.named_parameters(), engine.module.parameters(), strict=True):
            assert torch.equal(ours, weight), name


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_the_familiar_loop_has_the_same_bits(bf16: bool, nvme: Path) -> None:
    """Horizontal order, whose sums wait where the gradient then is, gives what train_batch gives in vertical order."""
    options = {**config(nvme, "RMSprop", PARAMS["RMSprop"], num_micro_batches=3), "bf16": {"enabled": bf16}}
    horizontal = {**options, "infinity": {**options["infinity"], "schedule": "horizontal"}}
    expected = train(ODD_MLP, options)
    require_same(train_familiarly(ODD_MLP, horizontal), expected)
    require_same(train(ODD_MLP, horizontal), expected)


class _Mine(torch.optim.Optimizer):
    """A user's own: it looks at the norm of a whole parameter, and counts its steps in the group and as a number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
                    rows = self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[:1] or (1,)))
                    rows += parameter.grad.reshape(*rows.shape, -1).sum(1)
                    norm = parameter.grad.norm() + rows.norm() / self.state[parameter]["seen"]
                    parameter.sub_(parameter.grad / (norm + 1), alpha=group["lr"] / group["num_steps"])


GIVEN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02),  # has state before its first step
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),  # looks at rows and columns
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "maximize": lambda params: torch.optim.Adam(params, lr=1e-3, maximize=True),
    "mine": lambda params: _Mine(params, lr=0.05),
}


@pytest.mark.parametrize("as_function", [False, True], ids=["object", "function"])
@pytest.mark.parametrize("given", GIVEN)
def test_a_given_optimizer_makes_the_updates(given: str, as_function: bool, nvme: Path) -> None:
    """C62: any optimizer of torch, a user's own class among them, trains with torch's bits, and a note says how it runs."""
    ours, model = ODD_MLP.build(), ODD_MLP.build()
    optimizer, make = GIVEN[given](model.parameters()), GIVEN[given]
    options = settings(nvme, bf16=False, clip=0.0)
    with open_engine(ours, options, optimizer=make if as_function else make(ours.parameters())) as engine:
        [note] = [note for note in engine.notes if "before step() returns" in note]
        assert type(optimizer).__name__ in note
        for step in range(4):
            engine.train_batch(ODD_MLP.batches(step, 1))
            step_with_torch(model, optimizer, ODD_MLP.batches(step, 1), 1.0)
        assert differing(engine, model) == []
        held = {id(parameter) for group in engine.optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in engine.module.parameters()}


def test_state_that_was_there_is_taken_over(nvme: Path) -> None:
    """An optimizer that has taken steps goes on from its momentum."""
    ours, model = ODD_MLP.build(), ODD_MLP.build()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (ours, model)]
    for one, optimizer in zip((ours, model), optimizers, strict=True):
        step_with_torch(one, optimizer, ODD_MLP.batches(0, 1), 1.0)
    with open_engine(ours, settings(nvme, bf16=False, clip=0.0), optimizer=optimizers[0]) as engine:
        engine.train_batch(ODD_MLP.batches(1, 1))
        step_with_torch(model, optimizers[1], ODD_MLP.batches(1, 1), 1.0)
        assert differing(engine, model) == []


def test_groups_of_the_configurations_optimizer(nvme: Path) -> None:
    """Groups given as model_parameters have hyper-parameters of the configured type; a key of another is refused."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 0.2, "momentum": 0.0}, {"params": others, "nesterov": True}]

    ours, model = ODD_MLP.build(), ODD_MLP.build()
    options = config(nvme, "SGD", {"lr": 0.05, "momentum": 0.5}, clip=0.0)
    optimizer = torch.optim.SGD(groups(model), lr=0.05, momentum=0.5)
    with pytest.raises(ConfigError, match=r"group 0 has 'params', 'betas'.*of lr, momentum, dampening"):
        infinity.initialize(model=ours, config=options, model_parameters=[{"params": [], "betas": (0.9, 0.9)}])
    with open_engine(ours, options, model_parameters=groups(ours)) as engine:
        for step in range(3):
            engine.train_batch(ODD_MLP.batches(step, 1))
            step_with_torch(model, optimizer, ODD_MLP.batches(step, 1), 1.0)
        assert differing(engine, model) == []


def resumed(kit: Kit, options: dict[str, Any], directory: Path, **given: Any) -> tuple[list[Any], list[Any]]:
    """Train six steps through, and three, a checkpoint, and three more in another engine; return what each ends with."""

    def go_on(engine: Engine, steps: range) -> list[Any]:
        losses = [engine.train_batch(kit.batches(step, 1, dtype)).loss for step in steps]
        return [losses[-3:], engine.optimizer.state_dict()["state"], engine.state_dict()]

    dtype = torch.bfloat16 if options["bf16"]["enabled"] else torch.float32
    ours, other = kit.build(), kit.build(seed=1)
    with open_engine(ours, options, **{name: make(ours.parameters()) for name, make in given.items()}) as engine:
        go_on(engine, range(3))
        engine.save_checkpoint(directory)
        through = go_on(engine, range(3, 6))
    with open_engine(other, options, **{name: make(other.parameters()) for name, make in given.items()}) as engine:
        engine.load_checkpoint(directory)
        return through, go_on(engine, range(3, 6))


def require_equal(through: list[Any], again: list[Any]) -> None:
    assert through[0] == again[0]
    for one, other in ((through[1], again[1]), *((through[1][number], again[1][number]) for number in through[1])):
        assert one.keys() == other.keys()
    pairs = [(state[key], again[1][number][key]) for number, state in through[1].items() for key in state]
    for value, other in pairs:
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    for name, value in through[2].items():
        assert torch.equal(value, again[2][name]), name


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "NAdam"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_a_checkpoint_goes_on_bit_for_bit(name: str, bf16: bool, nvme: Path, tmp_path: Path) -> None:
    """Masters, the optimizer's state and its counts come back: losses, state and weights are those of one run through."""
    options = {**config(nvme, name, PARAMS[name]), "bf16": {"enabled": bf16}}
    require_equal(*resumed(BRANCHY, options, tmp_path / "checkpoints"))


@pytest.mark.parametrize("given", ["adafactor", "amsgrad", "mine"])
def test_any_state_comes_back(given: str, nvme: Path, tmp_path: Path) -> None:
    """So do states with shapes of their own, plain numbers, and what a class counts in its groups."""
    options = settings(nvme, bf16=False)
    require_equal(*resumed(ODD_MLP, options, tmp_path / "checkpoints", optimizer=GIVEN[given]))


class _Global(torch.optim.SGD):
    """It keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["seen"] = {"steps": 1}  # type: ignore[index]


def test_a_state_that_no_checkpoint_holds_is_named(nvme: Path, tmp_path: Path) -> None:
    """A checkpoint without it would go on differently: saving is an error, and training goes on."""
    model = ODD_MLP.build()
    with open_engine(model, settings(nvme, bf16=False), optimizer=_Global(model.parameters(), lr=0.1)) as engine:
        engine.train_batch(ODD_MLP.batches(0, 1))
        with pytest.raises(CheckpointError, match="1 states that belong to no parameter, such as 'seen'"):
            engine.save_checkpoint(tmp_path / "checkpoints")
        engine.train_batch(ODD_MLP.batches(1, 1))


def test_a_checkpoint_of_another_optimizer_is_refused(nvme: Path, tmp_path: Path) -> None:
    """Between SGD, RMSprop and infinity's Adam nothing is loaded; the error names both."""
    kinds = [config(nvme, "SGD", PARAMS["SGD"]), config(nvme, "RMSprop", {}), settings(nvme, bf16=False)]
    words = ["SGD", "RMSprop", "infinity's Adam"]
    for number, options in enumerate(kinds):
        with open_engine(ODD_MLP.build(), options) as engine:
            engine.train_batch(ODD_MLP.batches(0, 1))
            engine.save_checkpoint(tmp_path / str(number))
            before = engine.state_dict()
            for other in range(number):
                with pytest.raises(CheckpointMismatch, match=f"optimizer {words[other]}; this run has {words[number]}"):
                    engine.load_checkpoint(tmp_path / str(other))
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
            engine.train_batch(ODD_MLP.batches(1, 1))


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_states_are_read_and_written_by_name(bf16: bool, nvme: Path) -> None:
    """safe_get and safe_set reach the momentum and the master of SGD; None before there is one, an error for other names."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    options = {**config(nvme, "SGD", {"lr": 0.1, "momentum": 0.5}, clip=0.0), "bf16": {"enabled": bf16}}
    with open_engine(ODD_MLP.build(), options) as engine:
        parameter = next(iter(engine.module.parameters()))
        assert infinity.utils.safe_get_full_optimizer_state(parameter, "momentum_buffer") is None
        engine.train_batch(ODD_MLP.batches(0, 1, dtype))
        momentum = infinity.utils.safe_get_full_optimizer_state(parameter, "momentum_buffer")
        assert momentum is not None
        assert momentum.shape == parameter.shape
        local = infinity.utils.safe_get_local_optimizer_state(parameter, "momentum_buffer")
        assert local is not None
        assert torch.equal(local, momentum.flatten())
        with pytest.raises(ModelError, match="no optimizer state 'exp_avg'"):
            infinity.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        master = torch.full_like(momentum, 1 / 3)
        infinity.utils.safe_set_full_fp32_param(parameter, master)
        infinity.utils.safe_set_full_optimizer_state(parameter, torch.full_like(momentum, 2.0), "momentum_buffer")
        found = infinity.utils.safe_get_full_fp32_param(parameter)
        assert found is not None
        assert torch.equal(found, master)
        assert torch.equal(parameter, master.to(dtype))
        for one in ODD_MLP.batches(1, 1, dtype):
            engine.backward(engine(*one))
        gradient = infinity.utils.safe_get_full_grad(parameter)
        assert gradient is not None
        engine.step()
        expected = master.clone()
        expected.add_(torch.full_like(momentum, 2.0).mul_(0.5).add_(gradient), alpha=-0.1)
        found = infinity.utils.safe_get_full_fp32_param(parameter)
        assert found is not None
        assert torch.equal(found, expected)


def test_what_the_user_writes_is_the_master(nvme: Path) -> None:
    """A value written into a resident bf16 parameter is where the next update starts, also beside a whole master."""
    options = {**settings(nvme, clip=0.0), "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    with open_engine(ODD_MLP.build(), options) as engine:
        parameter = next(iter(engine.module.parameters()))
        with torch.no_grad():
            parameter.fill_(0.75)
        engine.train_batch(ODD_MLP.batches(0, 1, torch.bfloat16))
        assert torch.equal(parameter, torch.full_like(parameter, 0.75))
        found = infinity.utils.safe_get_full_fp32_param(parameter)
        assert found is not None
        assert (found == 0.75).all()


def test_what_is_never_touched_keeps_everything(nvme: Path) -> None:
    """A branch without a gradient has no state and its weights, although weight decay would change them, as in torch."""
    options = config(nvme, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5})
    with open_engine(BRANCHY.build(), options) as engine:
        before = engine.state_dict()
        engine.train_batch(BRANCHY.batches(0, 1))
        after, names = engine.state_dict(), [name for name, _ in engine.module.named_parameters()]
        assert {name for name in names if torch.equal(before[name], after[name])} == {
            f"branches.{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")
        }
        assert len(engine.optimizer.state_dict()["state"]) == len(names) - 4


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_memory_is_that_of_the_plan(bf16: bool, nvme: Path) -> None:
    """Masters, state and fp32 gradients: every line of the plan is the ledger's peak."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    options = {**config(nvme, "NAdam", {}), "bf16": {"enabled": bf16}}
    with open_engine(TINY_GPT.build(), options) as engine:
        for step in range(2):
            engine.train_batch(TINY_GPT.batches(step, 1, dtype))
        owners = (Owner.OPTIMIZER, Owner.RULE_STATE, Owner.RULE_GRADIENTS)
        planned = {owner.value: engine.plan.owner_bytes(owner) for owner in owners}
        measured = {line.owner: line.peak_bytes for line in engine.memory_report() if line.owner in planned}
        assert [owner for owner in planned if not planned[owner]] == ([] if bf16 else [owners[0].value, owners[2].value])
        for owner, expected in planned.items():
            assert measured.get(owner, 0) == pytest.approx(expected, rel=0.05), owner


def test_nothing_of_it_goes_to_nvme(nvme: Path) -> None:
    """C66: a placement onto NVMe is a ConfigError, and a budget that NVMe alone could meet does not fit; nothing is left."""
    for state in ("optim", "params", "grads"):
        placement = Placement().override("*", **{state: "nvme"})
        with pytest.raises(ConfigError, match=f"{state} of .* onto NVMe.*Adam or AdamW, which work on every tier"):
            open_engine(ODD_MLP.build(), config(nvme, "SGD", {}), placement=placement)
    options = config(nvme, "SGD", {"momentum": 0.9}, optim="auto", params="auto", cpu_memory="8MiB")
    with pytest.raises(DoesNotFit):
        open_engine(ODD_MLP.build(), options)
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize(("name", "words"), [("LBFGS", "runs the model again"), ("SparseAdam", "sparse gradients")])
def test_what_cannot_be_served_is_refused(name: str, words: str, nvme: Path) -> None:
    """Two of torch's need more than a finished gradient: the error names them and what is supported."""
    model = ODD_MLP.build()
    with pytest.raises(ConfigError, match=f"{name}, which .*{words}.*Every other optimizer of torch is supported"):
        open_engine(model, settings(nvme), optimizer=getattr(torch.optim, name)(model.parameters()))


def test_rules_that_need_whole_parameters_are_refused_in_parts() -> None:
    """Where ranks own parts Adafactor is a ConfigError, SGD is silent, and a user's own class is told what it gets."""
    model = ODD_MLP.build()
    spec = ParameterSpec("weight", (8, 16), "float32", trainable=True, has_moments=False)
    whole, parts = (unit_layouts(0, "unit", [spec], tile_elements=64, stage=stage, num_ranks=2) for stage in (0, 1))

    def notes(given: str, layouts: UnitLayouts = parts) -> tuple[str, ...]:
        return groups_of(model, OptimizerSection(), None, GIVEN[given](model.parameters())).parts_notes([layouts])

    assert [notes(given, whole) for given in GIVEN] == [()] * len(GIVEN)
    assert notes("sgd") == ()
    assert "_Mine gets the part of each parameter" in notes("mine")[0]
    with pytest.raises(ConfigError, match=r"Adafactor, which needs whole parameters.*stage 0, or an optimizer"):
        notes("adafactor")


def test_a_model_on_the_meta_device_gets_its_optimizer_later(nvme: Path) -> None:
    """Named in the configuration it is made over masters that exist; one that was given has state without values."""
    with torch.device("meta"):
        ours, other = BULK.make(), BULK.make()
    with open_engine(ours, config(nvme, "Adagrad", {"initial_accumulator_value": 0.25})) as engine:
        engine.train_batch(BULK.batches(0, 1))
        assert all(bool((state["sum"] >= 0.25).all()) for state in engine.optimizer.state_dict()["state"].values())
    with pytest.raises(ConfigError, match=r"its state .* is on the meta device"):
        open_engine(other, settings(nvme, bf16=False), optimizer=torch.optim.Adagrad(other.parameters()))


def test_lion_is_the_published_rule() -> None:
    """Three steps in fp64 against the algorithm as it is printed."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, dtype=torch.float64))
    lion = Lion([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    value, momentum = parameter.detach().clone(), torch.zeros_like(parameter)
    for _ in range(3):
        parameter.grad = torch.randn(64, dtype=torch.float64)
        value -= 0.01 * (torch.sign(0.9 * momentum + 0.1 * parameter.grad) + 0.1 * value)
        momentum = 0.99 * momentum + 0.01 * parameter.grad
        lion.step()
    assert torch.allclose(parameter, value, rtol=1e-14)
    assert torch.allclose(lion.state[parameter]["exp_avg"], momentum, rtol=1e-12)
    with pytest.raises(ConfigError, match="Lion got lr -1"):
        Lion([parameter], lr=-1)
