"""A model whose units take long and know when they ran, for tests of the order of events."""

from __future__ import annotations

import time

import torch
from torch import nn

WIDTH, NUM_UNITS = 64, 6
FORWARD_SECONDS = 0.02


class Slow(nn.Module):
    """A unit that takes long, and knows when it ran."""

    def __init__(self, log: list[tuple[int, int, int]], number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.log = log
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = time.monotonic_ns()
        x = x + torch.tanh(self.linear(x))
        time.sleep(FORWARD_SECONDS)
        self.log.append((self.number, begin, time.monotonic_ns()))
        return x


class SlowModel(nn.Module):
    def __init__(self, log: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Slow(log, number) for number in range(NUM_UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()
