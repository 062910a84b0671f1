"""A unit that one micro-batch calls more than once: each call is a visit with sums of its own."""

import pytest
import torch
from harness import ABSENT, Block, Harness, same_in_every_way, vector_loss
from torch import nn


class Recurrent(nn.Module):
    """Runs its blocks several times over, with a head at the end."""

    def __init__(self, num_rounds, in_a_row=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 16)
        self.num_rounds = num_rounds
        self.in_a_row = in_a_row

    def forward(self, x):
        if self.in_a_row:
            for block in self.blocks:
                for _ in range(self.num_rounds):
                    x = block(x)
        else:
            for _ in range(self.num_rounds):
                for block in self.blocks:
                    x = block(x)
        return self.head(x)


@pytest.mark.parametrize("in_a_row", [False, True])
def test_repeated_units(in_a_row):
    """Units called three times give torch's gradients, the same bits in every schedule."""
    torch.manual_seed(0)
    same_in_every_way(Recurrent(3, in_a_row), vector_loss(3), 3, against_torch=1e-5)


def test_last_unit_called_twice():
    """The tail begins at the last visit of a unit, not at the first one."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(2))

        def forward(self, x):
            return self.blocks[1](self.blocks[0](self.blocks[1](x)))

    same_in_every_way(Model(), vector_loss(3), 3, against_torch=1e-5)
    harness = Harness(Model(), residency=ABSENT)
    harness.step(vector_loss(3), 3)
    harness.weights.acquired.clear()
    harness.step(vector_loss(3), 3)
    assert harness.visits() == ["blocks.1", "blocks.0", "blocks.1", "blocks.0", "blocks.1"]


def test_the_same_input_twice():
    """A unit that gets one tensor as two arguments sees that they are the same; each use counts once in the gradient."""
    torch.manual_seed(0)

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, *, memory):
            assert (x is memory) == self.expect_same
            return torch.tanh(self.left(x)) * memory + self.right(memory)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList(Cross() for _ in range(2))
            for block in self.blocks:
                block.expect_same = True

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, memory=x)
            return x

    same_in_every_way(Model(), vector_loss(3), 3, against_torch=1e-5)


def test_inputs_that_depend_on_each_other():
    """The last unit gets a tensor and a function of it: what flows through the second reaches the first once."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, y):
            return self.a(x) + self.b(y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList([Both()])

        def forward(self, x):
            x = self.first(x)
            return self.blocks[0](x, torch.sin(3 * x))

    same_in_every_way(Model(), vector_loss(3), 3, against_torch=1e-5)
