"""Exported weights load in the safetensors library and in transformers; ties are stored once; memory is one piece."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_fakes import names_in

from infinity.checkpoint.export import export_safetensors
from infinity.checkpoint.specs import TensorSpec
from infinity.errors import CheckpointError

SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.middle = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def specs_of(module: torch.nn.Module) -> list[TensorSpec]:
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in module.named_parameters()
    ]


def pieces_of(module: torch.nn.Module, piece: int = 5) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield pieces of all parameters, the last parameter first: the order is the source's."""
    for name, tensor in reversed(list(module.named_parameters())):
        flat = tensor.detach().reshape(-1)
        for first in range(0, flat.numel(), piece):
            yield name, first, flat[first : first + piece]


def export(directory: Path, module: torch.nn.Module, max_shard_bytes: int = 1 << 30, **aliases: str) -> tuple[Path, ...]:
    given = {name.replace("_", "."): target for name, target in aliases.items()}
    return export_safetensors(
        directory, specs_of(module), pieces_of(module), aliases=given, metadata={"infinity_step": "7"},
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def test_a_tied_model_loads_with_the_library(tmp_path: Path) -> None:
    """One copy is stored, the alias is in the metadata, and safetensors.torch.load_model fills a fresh model (C111)."""
    model, fresh = Tied(), Tied()
    assert export(tmp_path / "out", model, head_weight="embed.weight") == (tmp_path / "out/model.safetensors",)
    with safetensors.safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "infinity_step": "7", "head.weight": "embed.weight"}
        assert set(file.keys()) == {"embed.weight", "middle.weight", "middle.bias"}
    safetensors.torch.load_model(fresh, tmp_path / "out/model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_shards_have_the_index_that_loaders_expect(tmp_path: Path) -> None:
    """Shards are filled in order up to the limit; the index names each tensor's file and the total of bytes."""
    model = Tied()
    paths = export(tmp_path, model, max_shard_bytes=150, head_weight="embed.weight")
    assert [path.name for path in paths] == [*SHARDS, "model.safetensors.index.json"]
    assert names_in(tmp_path) == [*SHARDS, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict(zip(["embed.weight", "middle.weight", "middle.bias"], SHARDS, strict=True))
    assert index["metadata"]["total_size"] == 4 * (66 + 36 + 6)
    assert index["metadata"]["head.weight"] == "embed.weight"
    for name, shard in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / shard)[name], model.get_parameter(name))


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 10_000])
def test_transformers_loads_single_and_sharded_exports(tmp_path: Path, max_shard_bytes: int) -> None:
    """A tied GPT-2 exported in bf16 comes back from from_pretrained with every bit."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model: Any = GPT2LMHeadModel(config)
    model.to(torch.bfloat16)
    config.save_pretrained(tmp_path)
    ties = {"lm_head.weight": "transformer.wte.weight"}
    export_safetensors(
        tmp_path, specs_of(model), pieces_of(model, 1000), aliases=ties, metadata={}, max_shard_bytes=max_shard_bytes
    )
    assert (tmp_path / "model.safetensors").exists() == (max_shard_bytes == 1 << 30)
    result: Any = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    loaded, report = result
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_later_export_leaves_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """Loaders prefer model.safetensors over an index, so the files of another layout go; the user's files stay."""
    (tmp_path / "config.json").write_text("{}")
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    (tmp_path / f"model.safetensors.partial-{gone}").write_bytes(b"x")
    export(tmp_path, Tied())
    assert names_in(tmp_path) == ["config.json", "model.safetensors"]
    export(tmp_path, Tied(), max_shard_bytes=150)
    assert names_in(tmp_path) == ["config.json", *SHARDS, "model.safetensors.index.json"]
    export(tmp_path, Tied())
    assert names_in(tmp_path) == ["config.json", "model.safetensors"]


def test_a_failed_export_keeps_the_earlier_one(tmp_path: Path) -> None:
    """A tensor with missing elements never replaces weights that are whole."""
    export(tmp_path, Tied())
    before = (tmp_path / "model.safetensors").read_bytes()
    spec = TensorSpec("w", "float32", (4,))
    with pytest.raises(CheckpointError, match="elements 2 to 4 were never written"):
        export_safetensors(tmp_path, [spec], [("w", 0, torch.zeros(2))], aliases={}, metadata={})
    with pytest.raises(CheckpointError, match="v is not among the tensors"):
        export_safetensors(tmp_path, [spec], [("w", 0, torch.zeros(4)), ("v", 0, torch.zeros(2))], aliases={}, metadata={})
    assert names_in(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("alias", [("head", "absent"), ("w", "w")])
def test_an_alias_must_name_a_stored_tensor(tmp_path: Path, alias: tuple[str, str]) -> None:
    """A tie to nothing, or of a tensor that is stored itself, is refused before anything is written."""
    spec = TensorSpec("w", "float32", (1,))
    with pytest.raises(CheckpointError, match=f"{alias[0]} is tied to {alias[1]}"):
        export_safetensors(tmp_path / "new", [spec], [("w", 0, torch.zeros(1))], aliases=dict([alias]), metadata={})
    assert not (tmp_path / "new").exists()
