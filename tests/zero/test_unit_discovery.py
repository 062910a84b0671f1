"""Which modules are units, and how parameters are grouped."""

import pytest
import torch
from harness import Block, Harness, TinyModel, same_in_every_way
from torch import nn

from infinity.errors import ConfigError
from infinity.zero.units import cut_model


def _names(model, patterns=()):
    units, groups = cut_model(model, patterns)
    return [unit.name for unit in units], {group.name: [use.name for use in group.uses] for group in groups}


def test_blocks_and_leaves_with_a_matrix_are_units():
    """Elements of a ModuleList, embeddings and heads are units; norms and single parameters are the root group."""
    units, groups = _names(TinyModel(num_blocks=2))
    assert units == ["embed", "blocks.0", "blocks.1", "head"]
    assert list(groups) == ["embed", "blocks.0", "blocks.1", "head", "root"]
    assert groups["root"] == ["scale", "norm.weight", "norm.bias"]
    assert len(groups["blocks.0"]) == 6


def test_every_parameter_is_in_one_group():
    """No parameter is lost and none is there twice, with all of its places and names."""
    model = TinyModel(tied=True)
    _, groups = cut_model(model)
    uses = [use for group in groups for use in group.uses]
    assert sorted(use.name for use in uses) == sorted(name for name, _ in model.named_parameters())
    tied = next(use for use in uses if use.name == "embed.weight")
    assert tied.aliases == ("head.weight",)
    assert len(tied.places) == 2


def test_patterns_choose_the_units():
    """Class names and name patterns take the place of the rule; the rest is the root group."""
    model = TinyModel(num_blocks=2)
    assert _names(model, ["Block"])[0] == ["blocks.0", "blocks.1"]
    assert _names(model, ["blocks.1", "head"])[0] == ["blocks.1", "head"]
    assert _names(model, ["TinyModel"])[0] == ["TinyModel"]
    assert "embed.weight" in _names(model, ["Block"])[1]["root"]


def test_a_pattern_without_a_match_is_an_error():
    """The error names the pattern."""
    with pytest.raises(ConfigError, match="'Blok' matches no module"):
        cut_model(TinyModel(), ["Blok", "Block"])


def test_nested_containers_are_looked_into():
    """A ModuleList of ModuleLists and a Sequential in a ModuleDict give one unit for each innermost block."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.groups = nn.ModuleList(nn.ModuleList(Block(16) for _ in range(2)) for _ in range(2))
            self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))})

        def forward(self, x):
            for group in self.groups:
                for block in group:
                    x = block(x)
            return self.heads["a"](x).square().mean()

    torch.manual_seed(0)
    assert _names(Nested())[0] == ["groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1", "heads.a.0", "heads.a.2"]
    xs = torch.randn(3, 4, 16)
    same_in_every_way(Nested(), lambda model, k: model(xs[k]), 3, against_torch=1e-5)


def test_containers_are_never_units():
    """A pattern that matches a ModuleList or ModuleDict, which has no forward, takes what is inside it."""
    assert _names(TinyModel(num_blocks=2), ["blocks*"])[0] == ["blocks.0", "blocks.1"]


def test_modules_without_parameters_are_no_units():
    """Activations in a Sequential cost nothing."""
    assert _names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1), nn.LayerNorm(4)))[0] == ["0", "3"]


def test_a_model_that_is_one_leaf():
    """Its unit has the class's name, for its own name is empty."""
    assert _names(nn.Linear(4, 4)) == (["Linear"], {"Linear": ["weight", "bias"]})


def test_attention_is_a_unit_of_its_own():
    """Attention uses the weight of its output projection without calling it, so both are one unit."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 16)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0]).square().mean()

    torch.manual_seed(0)
    assert _names(Model())[0] == ["attention", "head"]
    xs = torch.randn(3, 2, 5, 16)
    same_in_every_way(Model(), lambda model, k: model(xs[k]), 3, against_torch=1e-5)


def test_detaching_gives_the_modules_their_forward_back():
    """Also a forward that somebody had replaced before."""
    model = TinyModel(num_blocks=2)
    own = model.blocks[0].forward
    replaced = lambda x: x * 2  # noqa: E731
    model.blocks[1].forward = replaced
    harness = Harness(model)
    assert model.blocks[0].forward != own
    harness.walk.detach()
    assert "forward" not in vars(model.blocks[0])
    assert model.blocks[1].forward is replaced
