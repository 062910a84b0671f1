"""Unused, frozen and partly frozen parameters, adapters among them."""

import torch
from harness import ABSENT, Harness, TinyModel, same_in_every_way, token_loss
from torch import nn


def test_unused_parameters_are_untouched():
    """A parameter without a gradient in any micro-batch is none of the step's business."""

    class Unused(TinyModel):
        def __init__(self):
            super().__init__()
            self.never = nn.Linear(16, 16)
            self.blocks[1].spare = nn.Parameter(torch.ones(3))

    torch.manual_seed(0)
    steps = same_in_every_way(Unused(), token_loss(3), 3, against_torch=1e-5)
    assert not {"never.weight", "never.bias", "blocks.1.spare"} & steps[0][1].keys()


def test_a_frozen_first_unit_has_no_backward_visit():
    """Nothing asks for the weights of a frozen embedding, and of frozen blocks after it, in backward."""
    torch.manual_seed(0)
    model = TinyModel(scaled=False)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    steps = same_in_every_way(model, token_loss(3), 3, against_torch="bits")
    assert not [name for name in steps[0][1] if name.startswith(("embed", "blocks.0"))]
    harness = Harness(model, residency=ABSENT)
    harness.step(token_loss(3), 3)
    harness.weights.acquired.clear()
    harness.step(token_loss(3), 3)
    assert harness.visits() == ["embed", "blocks.0", "blocks.1", "blocks.2", "head", "blocks.2", "blocks.1"]


def test_a_frozen_unit_in_the_middle_passes_gradients_on():
    """It has a backward visit, for what is before it is trained, and no gradient of its own."""
    torch.manual_seed(0)
    model = TinyModel(scaled=False)
    model.blocks[1].requires_grad_(False)
    model.head.requires_grad_(False)
    steps = same_in_every_way(model, token_loss(3), 3, against_torch="bits")
    assert not [name for name in steps[0][1] if name.startswith(("head", "blocks.1"))]
    assert [name for name in steps[0][1] if name.startswith("blocks.0")]


class Adapted(nn.Module):
    """A frozen linear map with a trained low-rank addition in fp32."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 4)

    def forward(self, x):
        low = nn.functional.linear(nn.functional.linear(x.to(self.down.dtype), self.down), self.up)
        return self.base(x) + low.to(x.dtype)


def _adapted(dtype, trained_embedding):
    model = TinyModel(scaled=False).to(dtype)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    model.embed.requires_grad_(trained_embedding)
    return model


def test_adapters_on_a_frozen_base():
    """Only adapters are trained, in a unit with both kinds of parameters and two dtypes."""
    torch.manual_seed(0)
    steps = same_in_every_way(_adapted(torch.bfloat16, False), token_loss(3), 3, against_torch="bits")
    assert {name.rpartition(".")[2] for name in steps[0][1]} == {"down", "up"}


def test_adapters_with_trained_embeddings():
    """The first unit is trained as well, so that gradients go all the way back."""
    torch.manual_seed(0)
    steps = same_in_every_way(_adapted(torch.float32, True), token_loss(3), 3, against_torch="bits")
    assert "embed.weight" in steps[0][1]


def test_a_frozen_parameter_of_no_unit():
    """A frozen norm between units has no gradient."""
    torch.manual_seed(0)
    model = TinyModel()
    model.norm.requires_grad_(False)
    steps = same_in_every_way(model, token_loss(3), 3, against_torch=1e-5)
    assert "norm.weight" not in steps[0][1]
    assert "scale" in steps[0][1]


class Noting(nn.Module):
    """A frozen unit that appends to a list among its arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x, seen):
        seen.append(float(x.mean()))
        return self.linear(x)


def test_a_unit_without_backward_may_change_its_lists():
    """It runs once, with the caller's own list."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Noting(), nn.Linear(16, 16)])

        def forward(self, x):
            return self.blocks[1](self.blocks[0](x, seen)).square().mean()

    harness = Harness(Model())
    harness.step(lambda model, k: model(torch.full((2, 16), float(k))), 3)
    assert sorted(seen) == [0.0, 0.0, 1.0, 2.0]  # the first micro-batch also taught the order
