"""zero.Init: modules whose parameters live in files as soon as they are made, ordinary tensors in every other way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError


class Net(nn.Module):
    """Every way in which a parameter gets its value: by its module, by hand, tied, a scalar, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((), 0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        nn.init.normal_(self.layers[1].weight, std=0.02)
        self.register_buffer("steps", torch.arange(3))
        with torch.no_grad():
            self.layers[0].bias += self.layers[1].weight.sum()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.head(x) * self.scale).square().mean()


def build() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def config(nvme: Path) -> dict[str, object]:
    return {"infinity": {"nvme": [str(nvme)], "cpu_memory": "256MiB"}}


def mapped(module: nn.Module) -> set[str]:
    """Names of the parameters that live in a file."""
    return {name for name, parameter in module.named_parameters() if parameter.untyped_storage().filename is not None}


def test_parameters_live_in_files_with_the_same_values(tmp_path: Path) -> None:
    """C13: every parameter but an empty one is mapped, tied ones stay tied, values are the same bits, no file is left."""
    with infinity.zero.Init(config_dict_or_path=config(tmp_path)):
        model = build()
    expected = build()
    assert mapped(model) == {name for name, _ in model.named_parameters()} - {"empty"}
    assert mapped(expected) == set()
    assert model.head.weight is model.embed.weight
    assert list(tmp_path.iterdir()) == []
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert mapped(nn.Linear(2, 2)) == set()  # the block is over


def test_training_goes_on_from_there(tmp_path: Path) -> None:
    """The engine takes the values over: losses and weights are bit for bit those of a model in memory, and files go."""
    states = []
    for enabled in (True, False):
        with infinity.zero.Init(config_dict_or_path=config(tmp_path), enabled=enabled):
            model = build()
        assert bool(mapped(model)) == enabled
        tokens = torch.arange(6).view(2, 3)
        with infinity.initialize(model=model, config=config(tmp_path)).engine as engine:
            losses = [engine.train_batch([(tokens,)]).loss for _ in range(3)]
            states.append((losses, engine.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(value, states[1][1][name]) for name, value in states[0][1].items())
    assert list(tmp_path.iterdir()) == []


def test_weights_may_be_loaded_inside_the_block_and_after_it(tmp_path: Path) -> None:
    """C13: load_state_dict in either order keeps the parameters where they are and gives them the loaded bits."""
    source = {
        name: torch.rand_like(value) if value.is_floating_point() else value for name, value in build().state_dict().items()
    }
    source["head.weight"] = source["embed.weight"]
    with infinity.zero.Init(config_dict_or_path=config(tmp_path)):
        inside = build()
        inside.load_state_dict(source)
        after = build()
    after.load_state_dict(source)
    for model in (inside, after):
        assert "layers.2.weight" in mapped(model)
        assert all(torch.equal(value, source[name]) for name, value in model.state_dict().items())


def test_an_existing_module_and_a_dtype(tmp_path: Path) -> None:
    """module= moves what is there; dtype= rounds floating-point parameters, and only those."""
    model = build()
    infinity.zero.Init(module=model, config=config(tmp_path), dtype=torch.bfloat16)
    assert "embed.weight" in mapped(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.steps.dtype is torch.int64
    for name, value in build().named_parameters():
        assert torch.equal(model.get_parameter(name), value.to(torch.bfloat16))


def test_blocks_nest_and_end_after_an_exception(tmp_path: Path) -> None:
    """Nested blocks are one; an exception ends them all; without a directory parameters stay in memory."""
    with infinity.zero.Init(config=config(tmp_path)):
        with infinity.zero.Init(config=config(tmp_path)):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert mapped(inner) == mapped(outer) == {"weight", "bias"}
    with pytest.raises(ZeroDivisionError), infinity.zero.Init(config=config(tmp_path)):
        raise ZeroDivisionError
    assert mapped(nn.Linear(2, 2)) == set()
    for block in (infinity.zero.Init(), infinity.zero.Init(config=config(tmp_path), remote_device="cpu")):
        with block:
            assert mapped(nn.Linear(2, 2)) == set()
    with infinity.zero.Init(config=config(tmp_path)), torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    """A configuration given twice, an unknown device, NVMe without a directory, a directory that cannot be written."""
    with pytest.raises(ConfigError, match="config_dict_or_path and config"):
        infinity.zero.Init(config=config(tmp_path), config_dict_or_path=config(tmp_path))
    with pytest.raises(ConfigError, match="'disk'"):
        infinity.zero.Init(config=config(tmp_path), remote_device="disk")
    with pytest.raises(ConfigError, match="names no directory"):
        infinity.zero.Init(remote_device="nvme")
    (tmp_path / "file").touch()
    with (
        pytest.raises(infinity.StorageError, match="could not be mapped"),
        infinity.zero.Init(config=config(tmp_path / "file")),
    ):
        nn.Linear(2, 2)
    assert os.listdir(tmp_path) == ["file"]
