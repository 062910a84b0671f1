"""Buffers that a unit changes: put back for the rerun, kept as the first run left them."""

import copy

import pytest
import torch
from harness import ABSENT, KEPT, Harness, require_close, require_same, torch_step, vector_loss
from torch import nn


class NormBlock(nn.Module):
    """Batch normalisation inside a unit."""

    def __init__(self, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


class NormModel(nn.Module):
    """Blocks with batch normalisation."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(NormBlock(width) for _ in range(3))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_batch_norm_trains_as_in_torch():
    """Losses and gradients are torch's, and one horizontal step leaves torch's running statistics."""
    torch.manual_seed(0)
    model, forward_loss = NormModel(), vector_loss(3)
    plain = copy.deepcopy(model)
    losses, expected = torch_step(plain, forward_loss, 3)
    harness = Harness(model)
    own_losses, gradients = harness.step(forward_loss, 3, schedule="horizontal")
    assert own_losses == losses
    require_close(gradients, expected, 1e-6)
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


@pytest.mark.parametrize("residency", [ABSENT, KEPT])
def test_vertical_order_counts_each_micro_batch_once(residency):
    """Gradients do not depend on the schedule; every micro-batch enters the running statistics once, learning none."""
    torch.manual_seed(0)
    model, forward_loss = NormModel(), vector_loss(3)
    plain = copy.deepcopy(model)
    losses, expected = torch_step(plain, forward_loss, 3)
    harness = Harness(model, residency=residency)
    own_losses, gradients = harness.step(forward_loss, 3)
    assert own_losses == losses
    require_close(gradients, expected, 1e-6)
    assert all(int(block.norm.num_batches_tracked) == 3 for block in model.blocks)


def test_running_statistics_are_those_of_the_order_of_work():
    """Vertical order runs micro-batches from the last to the first; the statistics are torch's for that order."""
    torch.manual_seed(0)
    model, forward_loss = NormModel(), vector_loss(3)
    plain = copy.deepcopy(model)
    for k in (2, 1, 0):
        forward_loss(plain, k)
    harness = Harness(model)
    harness.step(forward_loss, 3)
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


class MovingAverage(nn.Module):
    """Divides by a running mean that each call updates; `replaced` puts a new tensor in the buffer's place."""

    def __init__(self, replaced, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.ones(width))
        self.register_buffer("cache", torch.zeros(0))
        self.replaced = replaced

    def forward(self, x):
        update = 0.5 * self.mean + 0.5 * x.detach().abs().mean(dim=(0,))
        if self.replaced:
            self.mean = update
            if self.cache.shape[0] < x.shape[0]:
                self.cache = torch.arange(float(x.shape[0]))
        else:
            self.mean.copy_(update)
        return self.linear(x / self.mean) + self.cache.sum()


@pytest.mark.parametrize("replaced", [False, True])
def test_the_rerun_sees_the_buffers_of_the_first_run(replaced):
    """A buffer that matters in forward has its earlier value in the rerun, were it changed in place or replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(*(MovingAverage(replaced) for _ in range(3)))
    plain, forward_loss = copy.deepcopy(model), vector_loss(3)
    losses, expected = torch_step(plain, forward_loss, 3)
    harness = Harness(model, check=True)
    own_losses, gradients = harness.step(forward_loss, 3, schedule="horizontal")
    assert own_losses == losses
    require_same(gradients, expected)
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name


def test_learning_the_order_changes_no_buffer():
    """The run that only learns the order leaves buffers as they were, in units and outside of them."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(MovingAverage(True) for _ in range(2))
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    torch.manual_seed(0)
    model = Counting()
    plain, forward_loss = copy.deepcopy(model), vector_loss(1)
    torch_step(plain, forward_loss, 1)
    Harness(model).step(forward_loss, 1)
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
