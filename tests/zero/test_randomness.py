"""Random numbers depend on seed, step, micro-batch and place, and on nothing else."""

import pytest
import torch
from harness import ABSENT, Block, Harness, TinyModel, same_in_every_way, token_loss
from torch import nn


def test_masks_are_the_same_in_every_schedule():
    """Dropout inside units and between them gives the same bits in every schedule and residency, step after step."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(dropout=0.3, between=0.2), token_loss(3), 3, num_steps=3, against_torch=None)


def test_masks_differ_between_micro_batches_steps_and_units():
    """The same input gets another mask in another micro-batch, step or place."""

    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
            self.seen = []

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                self.seen.append((nn.functional.dropout(torch.ones(64), 0.5) != 0).tolist())
            return x.sum()

    harness = Harness(Masks())
    for _ in range(2):
        harness.step(lambda model, k: model(torch.ones(1, 64)), 2)
    masks = harness.model.seen[2:]  # the first two are those of the run that learns the order
    assert len(masks) == 8
    assert len({tuple(mask) for mask in masks}) == 8


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_the_users_generator_is_restored(schedule):
    """What the user draws after a step does not depend on the step."""
    harness = Harness(TinyModel(dropout=0.3), residency=ABSENT)
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    harness.step(token_loss(2), 2, schedule=schedule)
    assert torch.equal(torch.rand(5), expected)


def test_a_rerun_leaves_the_generator_alone():
    """A backward that the user calls leaves his generator as it was, although units run again in it."""
    harness = Harness(TinyModel(dropout=0.3), residency=ABSENT)
    from infinity.zero.micro_batch import MicroBatch

    harness.walk.begin(MicroBatch(0, 0))
    loss = token_loss(1)(harness.model, 0)
    harness.walk.end()
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    loss.backward()
    assert torch.equal(torch.rand(5), expected)


def test_masks_do_not_depend_on_the_rank_that_runs_a_micro_batch():
    """The place in the global batch decides: micro-batch 1 of one rank has the masks of micro-batch 0 of the next rank."""
    from infinity.zero.micro_batch import MicroBatch

    torch.manual_seed(0)
    harness = Harness(TinyModel(dropout=0.3, between=0.2))
    forward_loss = token_loss(2)

    def losses(places):
        batches = [MicroBatch(index, place) for index, place in enumerate(places)]
        return harness.vertical.run(
            lambda batch: forward_loss(harness.model, batch.global_index), batches, [1.0] * len(batches)
        )

    both = losses([0, 1])
    assert torch.equal(losses([1])[0], both[1])
    assert torch.equal(losses([0])[0], both[0])


class Noisy(Block):
    """Adds noise whose amount depends on Python's own state, which nobody puts back."""

    calls = 0

    def forward(self, x):
        Noisy.calls += 1
        return super().forward(x) * (1 + 0.01 * Noisy.calls)


def test_check_finds_a_unit_that_is_not_reproducible():
    """With `check` a rerun that gives other bits is an error that names the unit."""
    from infinity.errors import ModelError

    torch.manual_seed(0)
    harness = Harness(TinyModel(block=lambda: Noisy(16)), check=True)
    with pytest.raises(ModelError, match=r"Unit 'blocks\.2' gave other bits"):
        harness.step(token_loss(2), 2)


class Growing(Block):
    """Returns another shape at every call."""

    calls = 0

    def forward(self, x):
        Growing.calls += 1
        return super().forward(x).repeat(1, Growing.calls, 1).sum(dim=1, keepdim=True).repeat(1, Growing.calls, 1)


def test_a_rerun_with_another_shape_is_always_an_error():
    """Shape and dtype of the rerun's outputs are compared without `check` too."""
    from infinity.errors import ModelError

    model = TinyModel(num_blocks=1, block=lambda: Growing(16))
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def forward_loss(module, k):
        return module.head(module.blocks[0](module.embed(tokens))).sum()

    with pytest.raises(ModelError, match=r"Unit 'blocks\.0' gave another shape or dtype"):
        Harness(model, check=False).step(forward_loss, 2)
