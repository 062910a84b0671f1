"""A unit whose parameters are tied to several others needs as many weight slots as it has groups."""

from __future__ import annotations

from pathlib import Path

import torch
from kit import open_engine, settings
from torch import nn

from infinity.zero.units import cut_model


class Heads(nn.Module):
    """Four linear layers in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Chained(nn.Module):
    """The last unit shares a weight with each of the four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.heads = nn.ModuleList([Heads()])
        for layer, head in zip(self.layers, self.heads[0].parts, strict=True):
            head.weight = layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.heads[0](x).square().mean()


def test_a_unit_of_five_groups_trains_from_nvme(nvme: Path) -> None:
    """With everything on NVMe the plan has a slot for each group of the unit, and the loss is that of RAM."""
    losses = {}
    for tier in ("cpu", "nvme"):
        torch.manual_seed(0)
        model = Chained()
        config = settings(nvme, num_micro_batches=2, bf16=False, optim=tier, params=tier)
        batches = [torch.randn(3, 8, generator=torch.Generator().manual_seed(step)) for step in range(2)]
        with open_engine(model, config) as engine:
            assert max(len(unit.groups) for unit in cut_model(Chained())[0]) == 5
            losses[tier] = [engine.train_batch(batches).losses for _ in range(3)]
    assert losses["nvme"] == losses["cpu"]
