"""Autocast around the model, inside its forward, and inside units."""

import pytest
import torch
from harness import Block, TinyModel, same_in_every_way, token_loss


def _autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class AroundBlocks(TinyModel):
    """Autocast around the blocks only, as part of the model's forward."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        with _autocast():
            for block in self.blocks:
                x = block(x) * self.scale
        return self.loss(x.float(), targets)


class InsideBlock(Block):
    """Autocast as part of a unit's forward."""

    def forward(self, x):
        with _autocast():
            return super().forward(x).float()


class OffInsideBlock(Block):
    """A unit that turns autocast off for a part of it."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            hidden = self.up(self.norm(x.float()))
        return x + self.down(hidden)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_autocast_around_the_call(num_micro_batches):
    """Reruns have the autocast state of the first run, and the state between units is each micro-batch's own."""
    torch.manual_seed(0)
    inner = token_loss(num_micro_batches)

    def forward_loss(model, k):
        with _autocast():
            return inner(model, k)

    same_in_every_way(TinyModel(), forward_loss, num_micro_batches, against_torch=2e-2)


def test_autocast_inside_forward():
    """Autocast that the model turns on between two units is on for the units inside, in first run and rerun."""
    torch.manual_seed(0)
    same_in_every_way(AroundBlocks(), token_loss(3), 3, against_torch=2e-2)


def test_autocast_inside_units():
    """Autocast that a unit turns on itself is its own business."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(scaled=False, block=lambda: InsideBlock(16)), token_loss(3), 3, against_torch="bits")


def test_autocast_off_inside_units():
    """A unit may turn off what its caller turned on."""
    torch.manual_seed(0)
    inner = token_loss(3)

    def forward_loss(model, k):
        with _autocast():
            return inner(model, k)

    same_in_every_way(TinyModel(block=lambda: OffInsideBlock(16)), forward_loss, 3, against_torch=2e-2)


def test_units_run_in_bf16_under_autocast():
    """The state really reaches the units: their matrix products give bfloat16."""
    seen = []
    model = TinyModel()
    model.blocks[0].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    inner = token_loss(2)

    def forward_loss(module, k):
        with _autocast():
            return inner(module, k)

    from harness import Harness

    Harness(model).step(forward_loss, 2)
    assert len(seen) == 5  # one to learn the order, two first runs, two reruns
    assert set(seen) == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
