"""One rank of a job whose ranks go through the same units in different orders, and load a checkpoint in the middle."""

from __future__ import annotations

import torch
from kit import open_engine, settings
from torch import nn

WIDTH = 32


class EitherWay(nn.Module):
    """Two units; which of them comes first is the input's to say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return a loss."""
        return self.blocks[1 - first](self.blocks[first](x)).float().square().mean()


def load_in_the_middle(nvme: str, checkpoints: str, stage: int) -> tuple[list[float], list[float]]:
    """Take a step, save, go on, load, and take the same steps again; return the losses of both times."""
    torch.manual_seed(0)
    config = settings(nvme, optim="nvme", params="cpu", bf16=False)
    config["zero_optimization"]["stage"] = stage
    with open_engine(EitherWay(), config) as engine:

        def losses(steps: range) -> list[float]:
            found = []
            for step in steps:
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                found.append(engine.train_batch([(x, engine.global_rank)]).loss)
            return found

        losses(range(1))
        path = engine.save_checkpoint(checkpoints)
        once = losses(range(1, 4))
        engine.load_checkpoint(path)
        return once, losses(range(1, 4))
