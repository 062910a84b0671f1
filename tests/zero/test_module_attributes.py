"""Tensors that a model keeps in attributes while it runs: each micro-batch has its own in vertical order."""

import torch
from harness import (
    ABSENT,
    KEPT,
    RESIDENT,
    Block,
    Harness,
    TinyModel,
    require_close,
    same_in_every_way,
    token_loss,
    torch_step,
)
from torch import nn

from infinity.errors import SideChannelError


class Masking(Block):
    """Uses a mask that somebody put into it."""

    mask = None

    def forward(self, x):
        return super().forward(x) * self.mask


class MaskingModel(TinyModel):
    """Tells its blocks by an attribute which tokens count."""

    def forward(self, tokens, targets):
        for block in self.blocks:
            block.mask = (tokens % 3 != 0).unsqueeze(-1).float()
        return super().forward(tokens, targets)


def test_a_mask_in_an_attribute():
    """Each micro-batch finds its own mask, in the first run and in the rerun."""
    torch.manual_seed(0)
    same_in_every_way(MaskingModel(block=lambda: Masking(16)), token_loss(3), 3, against_torch=1e-5)


class AuxBlock(Block):
    """Leaves a loss in an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class AuxModel(TinyModel):
    """Adds up the losses that its blocks left, at the end."""

    def forward(self, tokens, targets):
        return super().forward(tokens, targets) + 0.1 * sum(block.aux for block in self.blocks)


def test_a_loss_in_an_attribute_of_a_unit_that_stays():
    """Where weights stay, each micro-batch adds up its own losses, not those of the one that ran last."""
    torch.manual_seed(0)
    model, forward_loss = AuxModel(block=lambda: AuxBlock(16)), token_loss(3)
    losses, expected = torch_step(model, forward_loss, 3)
    for residency in (KEPT, RESIDENT):
        torch.manual_seed(0)
        harness = Harness(AuxModel(block=lambda: AuxBlock(16)), residency=residency)
        for _ in range(2):
            own, gradients = harness.step(forward_loss, 3)
            assert own == losses
            require_close(gradients, expected, 1e-5)


class Collecting(Block):
    """Appends a loss to a list that all micro-batches share."""

    losses = []  # noqa: RUF012

    def forward(self, x):
        y = super().forward(x)
        self.losses.append(y.square().mean())
        return y


class CollectingModel(TinyModel):
    """Clears the list, runs, and adds up what is in it."""

    def forward(self, tokens, targets):
        Collecting.losses.clear()
        return super().forward(tokens, targets) + 0.1 * sum(Collecting.losses)


def test_a_list_that_all_micro_batches_share_is_an_error():
    """A loss that depends on another micro-batch's tensors is refused; alone, a micro-batch may do so."""
    import pytest

    torch.manual_seed(0)
    harness = Harness(CollectingModel(block=lambda: Collecting(16)), residency=KEPT)
    with pytest.raises(SideChannelError, match="depends on a tensor of micro-batch"):
        harness.step(token_loss(3), 3)
    Collecting.losses.clear()
    harness.step(token_loss(1), 1)
    Collecting.losses.clear()
    harness.step(token_loss(3), 3, schedule="horizontal")


class Logging(TinyModel):
    """Keeps what a user would log, and a cache that it makes once."""

    cache_is_made = False

    def forward(self, tokens, targets):
        if not self.cache_is_made:
            self.cache, self.cache_is_made = torch.ones(16), True
        self.blocks[0].norm.eps = float(self.cache[0]) * 1e-5
        loss = super().forward(tokens, targets)
        self.last_loss = loss.detach()
        return loss


def test_attributes_after_a_step():
    """After a step attributes hold what the last micro-batch left, and a cache that learning the order made first."""
    torch.manual_seed(0)
    for schedule in ("vertical", "horizontal"):
        harness = Harness(Logging(), residency=ABSENT)
        losses, _ = harness.step(token_loss(3), 3, schedule=schedule)
        assert float(harness.model.last_loss) == losses[-1]
        assert torch.equal(harness.model.cache, torch.ones(16))


def test_learning_the_order_counts_nothing_twice():
    """An attribute that held a tensor before the run that learns the order holds it again afterwards."""

    class Averaging(TinyModel):
        def __init__(self):
            super().__init__()
            self.average = torch.zeros(())

        def forward(self, tokens, targets):
            loss = super().forward(tokens, targets)
            self.average = 0.5 * self.average + 0.5 * loss.detach()
            return loss

    torch.manual_seed(0)
    harness = Harness(Averaging())
    losses, _ = harness.step(token_loss(1), 1)
    assert float(harness.model.average) == 0.5 * losses[0]


def test_no_graph_of_the_learning_run_stays():
    """A hidden state that the run which learnt the order left behind is gone before the step begins."""
    seen = []

    class Keeping(TinyModel):
        hidden = None

        def forward(self, tokens, targets):
            seen.append(self.hidden)
            self.hidden = self.embed(tokens)
            return self.loss(self.blocks[0](self.hidden), targets)

    Harness(Keeping(), residency=KEPT).step(token_loss(2), 2)
    assert seen == [None] * 3


def test_buffers_are_shared():
    """A registered buffer is no micro-batch's own: all of them update the same one."""

    class Counting(Block):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x)

    model = TinyModel(block=lambda: Counting(16))
    Harness(model).step(token_loss(3), 3)
    assert [float(block.count) for block in model.blocks] == [3.0] * 3


def test_attributes_of_a_step_that_failed():
    """After an exception attributes hold what they held before the step."""
    import pytest

    torch.manual_seed(0)

    class Failing(Logging):
        fails = False

        def loss(self, x, targets):
            self.hidden = x.detach()
            if self.fails:
                raise KeyError
            return super().loss(x, targets)

    harness = Harness(Failing())
    harness.step(token_loss(3), 3)
    hidden = harness.model.hidden
    harness.model.fails = True
    with pytest.raises(KeyError):
        harness.step(token_loss(3), 3)
    assert harness.model.hidden is hidden
    assert isinstance(harness.model.norm, nn.LayerNorm)
