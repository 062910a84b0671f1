"""A unit that writes into its inputs or its weights: the rerun would start from other values, so it is an error."""

import pytest
import torch
from harness import ABSENT, KEPT, RESIDENT, Block, Harness, TinyModel, same_in_every_way, token_loss
from torch import nn

from infinity.errors import InputChangedError


class AddsInPlace(Block):
    """Changes its input with +=."""

    def forward(self, x):
        y = super().forward(x)
        x += 1
        return y


class Relu(Block):
    """Applies an in-place activation to its input."""

    def forward(self, x):
        return super().forward(nn.functional.relu_(x))


class WritesMask(Block):
    """Writes into an integer tensor that it was given."""

    def forward(self, x, mask):
        mask.fill_(0)
        return super().forward(x)


class ClampsWeight(Block):
    """Clamps its own weight before use."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class MaskModel(TinyModel):
    """Gives its blocks a mask."""

    def forward(self, tokens, targets):
        mask, x = torch.ones_like(tokens), self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.loss(x, targets)


@pytest.mark.parametrize("residency", [ABSENT, KEPT, RESIDENT])
@pytest.mark.parametrize("kind", [AddsInPlace, Relu])
def test_an_input_changed_in_place_is_an_error(kind, residency):
    """The error names the unit, wherever its weights live."""
    torch.manual_seed(0)
    harness = Harness(TinyModel(block=lambda: kind(16)), residency=residency)
    with pytest.raises(InputChangedError, match=r"Unit 'blocks\.0' changes"):
        harness.step(token_loss(2), 2)


@pytest.mark.parametrize("residency", [ABSENT, KEPT])
def test_inputs_without_gradient_count_too(residency):
    """An integer mask that a unit writes into is seen as well."""
    torch.manual_seed(0)
    harness = Harness(MaskModel(block=lambda: WritesMask(16)), residency=residency)
    with pytest.raises(InputChangedError, match=r"Unit 'blocks\.0' changes its input tensor 1"):
        harness.step(token_loss(2), 2)


@pytest.mark.parametrize("residency", [ABSENT, KEPT])
def test_a_weight_changed_in_place_is_an_error(residency):
    """A unit that clamps its weight, or an embedding that renormalises it, would change a copy that is thrown away."""
    torch.manual_seed(0)
    with pytest.raises(InputChangedError, match=r"Unit 'blocks\.0' changes its weight"):
        Harness(TinyModel(block=lambda: ClampsWeight(16)), residency=residency).step(token_loss(2), 2)
    model = TinyModel()
    model.embed = nn.Embedding(37, 16, max_norm=0.5)
    with pytest.raises(InputChangedError, match="Unit 'embed'"):
        Harness(model, residency=residency).step(token_loss(2), 2)


class InPlaceBetween(TinyModel):
    """Changes the outputs of its units in place, between them."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
            x = torch.nn.functional.relu_(x)
        return self.loss(x, targets)


def test_outputs_may_be_changed_between_units():
    """What is done in place to a unit's result outside of it is ordinary autograd."""
    torch.manual_seed(0)
    same_in_every_way(InPlaceBetween(), token_loss(3), 3, against_torch=1e-5)


class ChangesLater(TinyModel):
    """Changes a unit's input after the unit has used it."""

    def forward(self, tokens, targets):
        x = self.embed(tokens) * 1.0
        y = self.blocks[0](x)
        x.add_(1.0)
        return self.loss(self.blocks[2](self.blocks[1](y)), targets)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_kept_input_changed_later_is_an_error(schedule):
    """A change between units of what backward still needs is refused, as torch refuses it."""
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Harness(ChangesLater()).step(token_loss(2), 2, schedule=schedule)
