"""Models whose way through the units depends on the micro-batch or on the step."""

import pytest
import torch
from harness import ABSENT, Block, Harness, TinyModel, require_close, same_in_every_way, token_loss, torch_step
from torch import nn


class Branchy(TinyModel):
    """Skips, repeats and swaps blocks as `ways` says for each micro-batch."""

    ways = ((0, 1, 2), (0, 2), (2, 1, 0), (1,), (0, 0, 1, 2))

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def forward(self, tokens, targets, way):
        self.calls.append(way)
        x = self.embed(tokens)
        for number in self.ways[way]:
            x = self.blocks[number](x) * self.scale
        return self.loss(x, targets)


def _branchy_loss(num, ways):
    inner = token_loss(num)
    batches = inner.__closure__[0].cell_contents
    return lambda model, k: model(*batches[k], ways[k])


@pytest.mark.parametrize("ways", [(0, 1, 2), (1, 0, 3, 2, 4), (4, 4, 0), (3, 0)])
def test_branches_agree_to_rounding(ways):
    """Micro-batches that go different ways give torch's gradients in both schedules."""
    torch.manual_seed(0)
    model, forward_loss = Branchy(), _branchy_loss(len(ways), ways)
    losses, expected = torch_step(model, forward_loss, len(ways))
    for schedule in ("vertical", "horizontal"):
        torch.manual_seed(0)
        harness = Harness(Branchy())
        for _ in range(2):
            own, gradients = harness.step(forward_loss, len(ways), schedule=schedule)
            assert own == losses
            require_close(gradients, expected, 1e-5)


@pytest.mark.parametrize("ways", [(0, 1, 0), (1, 0, 1)])
def test_skipped_units_leave_the_sums_in_order(ways):
    """Sums go by the visit of the unit, not by how many units were before it: skipping changes no bit."""
    torch.manual_seed(0)
    model = Branchy(scaled=False)
    same_in_every_way(model, _branchy_loss(3, ways), 3, against_torch="bits")


def test_a_unit_on_a_detour_is_loaded_again():
    """Where ways differ those behind go first; a unit that is needed again later is asked for again, no more than that."""
    torch.manual_seed(0)
    harness = Harness(Branchy())
    straight, mixed = _branchy_loss(3, (0, 0, 0)), _branchy_loss(3, (0, 2, 0))
    harness.step(straight, 3)
    harness.weights.acquired.clear()
    harness.step(straight, 3)
    usual = len(harness.visits())
    harness.weights.acquired.clear()
    harness.step(mixed, 3)
    assert usual < len(harness.visits()) <= 2 * usual


def test_the_order_may_change_from_step_to_step():
    """A model that permutes its blocks at every step is trained as in torch."""
    torch.manual_seed(0)
    harness = Harness(Branchy())
    for way in (0, 2, 1, 4, 0):
        forward_loss = _branchy_loss(3, (way,) * 3)
        torch.manual_seed(0)
        losses, expected = torch_step(Branchy(), forward_loss, 3)
        own, gradients = harness.step(forward_loss, 3)
        assert own == losses
        require_close(gradients, expected, 1e-5)


class TwoHeads(nn.Module):
    """One of two heads, or both in either order."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(Block(16) for _ in range(2))
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, heads):
        for block in self.body:
            x = block(x)
        for head in heads:
            x = torch.tanh(getattr(self, head)(x))
        return x


def _heads_loss(heads):
    generator = torch.Generator().manual_seed(5)
    pairs = torch.randn(len(heads), 2, 3, 16, generator=generator)
    return lambda model, k: nn.functional.mse_loss(model(pairs[k][0], heads[k]), pairs[k][1])


@pytest.mark.parametrize(
    "later",
    [
        [("right",)] * 3,
        [("left", "right")] * 3,
        [("right", "left")] * 3,
        [("left",), ("left", "right"), ("right",)],
        [("left", "left"), ("left",), ("left", "right", "left")],
        [(), ("left",), ("right",)],
    ],
)
def test_units_after_the_learnt_tail(later):
    """What comes after the unit that was the last one when the order was learnt is run again like any other unit."""
    torch.manual_seed(0)
    harness = Harness(TwoHeads(), residency=ABSENT)
    harness.step(_heads_loss([("left",)] * 3), 3)
    torch.manual_seed(0)
    losses, expected = torch_step(TwoHeads(), _heads_loss(later), 3)
    own, gradients = harness.step(_heads_loss(later), 3)
    torch.testing.assert_close(own, losses)
    require_close(gradients, expected, 1e-5)
    assert set(harness.weights.held.values()) == {0}


def test_a_unit_that_no_micro_batch_visits_is_untouched():
    """An unused branch has no gradient at all, not a gradient of zero."""
    torch.manual_seed(0)
    harness = Harness(TwoHeads())
    _, gradients = harness.step(_heads_loss([("left",)] * 2), 2)
    assert not [name for name in gradients if name.startswith("right")]
    _, gradients = harness.step(_heads_loss([("right",)] * 2), 2)
    assert not [name for name in gradients if name.startswith("left")]
    assert [name for name in gradients if name.startswith("right")]
