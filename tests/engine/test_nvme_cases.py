"""Sizes, buffers and ways of building a model that have broken other offload engines, with every state on NVMe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import (
    BIG_EMBED,
    ODD_MLP,
    TINY_GPT,
    GptBlock,
    Kit,
    TinyGpt,
    open_engine,
    require_same,
    require_same_state,
    settings,
    train,
    train_engine,
)
from torch import nn

from infinity.errors import IllegalTransition, ModelError

NVME = {"optim": "nvme", "params": "nvme"}


class _Strange(nn.Module):
    """A unit whose parameters have byte sizes n * 512 + {1, 2, 4, 510} elements or bytes, and many single elements."""

    def __init__(self) -> None:
        super().__init__()
        numels = (256 + 1, 256 + 2, 512 + 1, 512 + 2, 512 + 4, 512 + 510, 1024 + 255)
        self.large = nn.ParameterList(nn.Parameter(torch.randn(numel) * 0.1) for numel in numels)
        self.single = nn.ParameterList(nn.Parameter(torch.randn(()) * 0.1) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for large in self.large:
            x = x + torch.tanh((large * x.mean()).sum())
        for single in self.single:
            x = x * (1 + single)
        return x


class StrangeSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Strange(), _Strange()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


STRANGE = Kit("strange", StrangeSizes, lambda generator, step: (torch.randn(4, generator=generator),))


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kit", "tile_bytes"),
    [(STRANGE, 640), (STRANGE, "4KiB"), (STRANGE, "8MiB"), (ODD_MLP, "64KiB"), (ODD_MLP, "8MiB")],
    ids=lambda value: value.name if isinstance(value, Kit) else str(value),
)
def test_any_byte_size_round_trips(kit: Kit, bf16: bool, tile_bytes: int | str, nvme: Path) -> None:
    """C1: parameters of n * 512 + {1, 2, 4, 510} elements in blocks of 1 MiB; two steps give the bits of a run in RAM."""
    config = {**settings(nvme, bf16=bf16, tile_bytes=tile_bytes, **NVME), "aio": {"block_size": 1 << 20}}
    expected = train(kit, settings(nvme, bf16=bf16), num_steps=2)
    require_same(train(kit, config, num_steps=2), expected)


@pytest.mark.parametrize("kit", [ODD_MLP, STRANGE], ids=lambda kit: kit.name)
def test_single_elements_need_no_care(kit: Kit, nvme: Path) -> None:
    """C15: one-element tensors beside large ones with two micro-batches, on NVMe and in both orders."""
    expected = train(kit, settings(nvme, num_micro_batches=2))
    for schedule in ("vertical", "horizontal"):
        require_same(train(kit, settings(nvme, num_micro_batches=2, schedule=schedule, **NVME)), expected)


def test_one_linear_with_default_settings(nvme: Path) -> None:
    """C2: a model that is one Linear(512, 1000), batch 1, nothing set but the tiers: it trains, and NVMe is used."""
    torch.manual_seed(0)
    model = nn.Linear(512, 1000)
    expected = nn.Linear(512, 1000)
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(expected.parameters(), foreach=False)
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)},
            "offload_param": {"device": "nvme", "nvme_path": str(nvme)},
        }
    }

    def loss_of(output: torch.Tensor, micro_batch: Any) -> torch.Tensor:
        return output.square().mean()

    x = torch.randn(1, 512)
    with open_engine(model, config) as engine:
        for _ in range(3):
            result = engine.train_batch([x], loss_fn=loss_of)
            loss = loss_of(expected(x), x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
            assert result.nvme_read_bytes > 0
        state = engine.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_parameter_larger_than_any_buffer(nvme: Path) -> None:
    """C6: an embedding of 50 000 x 64 streams through tiles and requests of 1 MiB at most, with the bits of a run in RAM."""
    config = settings(nvme, tile_bytes="1MiB", check=False, **NVME)
    config["aio"] = {"block_size": 1 << 18, "queue_depth": 2}
    run = train(BIG_EMBED, config, num_steps=2)
    require_same(run, train(BIG_EMBED, settings(nvme, check=False, tile_bytes="8MiB"), num_steps=2))
    peaks = {line.owner: line.peak_bytes for line in run.memory}
    assert peaks["tile slots"] <= 8 << 20  # eight slots of 1 MiB; the state of the embedding alone is 32 MB


def test_two_slots_for_24_layers_and_a_layer_used_twice(nvme: Path) -> None:
    """C8: 24 layers, the first one called again at the end, through two weight slots and two tile slots."""
    deep = Kit("deep", lambda: TinyGpt(num_layers=24, width=24, shared_layer=True), TINY_GPT.micro_batch)
    expected = train(deep, settings(nvme, num_micro_batches=2), num_steps=2)
    for schedule in ("vertical", "horizontal"):
        config = settings(nvme, num_micro_batches=2, weight_slots=2, tile_slots=2, schedule=schedule, **NVME)
        run = train(deep, config, num_steps=2)
        require_same(run, expected)
        peaks = {line.owner: line.peak_bytes for line in run.memory}
        assert peaks["weight slots"] <= 2 * 32768  # two of the largest unit, in whole pages


# Ways of building a model


def initialise(module: nn.Module, name: str) -> None:
    """Fill a module's own parameters with values that depend on its name alone."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for parameter in module.parameters(recurse=False):
        with torch.no_grad():
            parameter.normal_(0.0, 0.1, generator=generator)


class PlainGpt(TinyGpt):
    """Without buffers, so that it can be made on the meta device."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        del self.positions, self.gain
        self.positions, self.gain = torch.zeros(64), torch.ones(())


PLAIN = Kit("plain", PlainGpt, TINY_GPT.micro_batch)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_meta_model_with_init_equals_a_built_one(bf16: bool, tiers: tuple[str, str], nvme: Path) -> None:
    """C16: on the meta device with init=, or built and filled by the same function: the same weights and steps."""
    config = settings(nvme, bf16=bf16, optim=tiers[0], params=tiers[1])
    built = PLAIN.build()
    for name, module in built.named_modules():
        initialise(module, name)
    initialise(built.embed, "embed")  # its weight is the head's too; the first name decides
    with torch.device("meta"):
        meta = PlainGpt()
    meta.positions, meta.gain = torch.zeros(64), torch.ones(())
    with open_engine(built, config) as engine:
        initial = engine.state_dict()
        expected = train_engine(engine, PLAIN, config, range(2))
    with open_engine(meta, config, init=initialise) as engine:
        require_same_state(engine.state_dict(), initial)
        require_same(train_engine(engine, PLAIN, config, range(2)), expected)


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
def test_meta_model_with_reset_parameters(tiers: tuple[str, str], nvme: Path) -> None:
    """C16: without init=, each module's reset_parameters() gives its values: those of torch's own ranges, and it trains."""
    with torch.device("meta"):
        model = PlainGpt()
    model.positions, model.gain = torch.zeros(64), torch.ones(())
    torch.manual_seed(3)
    config = settings(nvme, bf16=False, optim=tiers[0], params=tiers[1])
    with open_engine(model, config) as engine:
        state = engine.state_dict()
        assert torch.equal(state["norm.weight"], torch.ones(48))
        assert torch.equal(state["head.weight"], state["embed.weight"])
        weight = state["blocks.1.up.weight"]
        assert 0.9 * 48**-0.5 < float(weight.abs().max()) <= 48**-0.5
        assert 0.9 < float(state["embed.weight"].std()) < 1.1
        losses = [engine.train_batch(PLAIN.batches(0, 1)).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_meta_module_that_cannot_be_filled_is_one_clear_error(nvme: Path) -> None:
    """C16: a meta parameter that nothing initialises is refused by name, with the call that is missing; nothing stays."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).sum()

    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(ModelError, match=r"'0'.*reset_parameters.*init"):
        open_engine(model, settings(nvme, **NVME))
    assert list(nvme.iterdir()) == []


def test_meta_buffer_is_one_clear_error(nvme: Path) -> None:
    """C16: a buffer that was left on the meta device is named before any step is tried."""
    with torch.device("meta"):
        model = TinyGpt()
    with pytest.raises(ModelError, match="positions"):
        open_engine(model, settings(nvme, **NVME))
    assert list(nvme.iterdir()) == []


def test_weights_loaded_before(nvme: Path) -> None:
    """C16: load_state_dict before initialize counts, tied names included."""
    other = TINY_GPT.build(seed=7)
    model = TINY_GPT.build(seed=1)
    model.load_state_dict(other.state_dict())
    with open_engine(model, settings(nvme, **NVME)) as engine:
        require_same_state(engine.state_dict(), other.state_dict())


@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")], ids="-".join)
def test_weights_loaded_after_are_refused(tiers: tuple[str, str], nvme: Path) -> None:
    """C16: load_state_dict on what the engine has taken over is one clear error on every tier, and changes nothing.

    Loaded into a resident bf16 weight, the new values would meet the low halves of the old master.
    """
    model, other = TINY_GPT.build(seed=1), TINY_GPT.build(seed=7)
    with open_engine(model, settings(nvme, optim=tiers[0], params=tiers[1])) as engine:
        before = engine.state_dict()
        with pytest.raises(IllegalTransition, match=r"before infinity.initialize.*load_checkpoint"):
            model.load_state_dict(other.state_dict())
        with pytest.raises(IllegalTransition, match="GptBlock"):
            model.blocks[1].load_state_dict(other.blocks[1].state_dict())
        require_same_state(engine.state_dict(), before)
    fresh = TINY_GPT.build(seed=1)
    fresh.load_state_dict(other.state_dict())


def test_built_in_another_dtype(nvme: Path) -> None:
    """C16: a model that was built in bf16 trains as the fp32 model of the same values does."""
    rounded = TINY_GPT.build().to(torch.bfloat16)
    for buffer in ("positions", "gain"):
        setattr(rounded, buffer, getattr(TINY_GPT.build(), buffer))
    same = TINY_GPT.build()
    same.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    runs = []
    for model in (rounded, same):
        config = settings(nvme, **NVME)
        with open_engine(model, config) as engine:
            runs.append(train_engine(engine, TINY_GPT, config, range(2)))
    require_same(*runs)


def test_model_is_as_before_when_closed(nvme: Path) -> None:
    """After close the units have their own forward again, so the module can be given to another engine or called on meta."""
    model = TINY_GPT.build()
    with open_engine(model, settings(nvme, **NVME)) as engine:
        engine.train_batch(TINY_GPT.batches(0, 1, torch.bfloat16))
    assert all("forward" not in vars(module) for module in model.modules() if isinstance(module, GptBlock))
