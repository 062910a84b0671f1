"""Conformance checks of backward passes that users begin themselves: each compares every element with plain torch."""

from __future__ import annotations

from typing import Any

import torch
from conformance import Twins
from kit import TINY_GPT, LoraGpt
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infinity import utils

WIDTH = 24


class RmsNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class CheckpointedBlock(nn.Module):
    """A feed-forward layer that torch.utils.checkpoint runs again in backward; its norm is frozen."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.norm = RmsNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm.weight.requires_grad_(False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=self.use_reentrant)


class Tower(nn.Module):
    """Vectors in, vectors out: the loss, if any, is the user's."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(CheckpointedBlock(use_reentrant) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoHeads(nn.Module):
    """A trunk and two outputs that share it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.trunk(x)
        return {"left": self.left(hidden).square().mean(), "right": self.right(hidden).abs().mean()}


def seeded(build: Any, *args: Any) -> Any:
    """Return a function that builds the module with the same values every time."""

    def seeded_build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module: nn.Module = build(*args)
            return module

    return seeded_build


def vectors(step: int, num: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Return `num` micro-batches of inputs, and what belongs to each in the shape of Tower's output."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(3, 8, generator=generator).to(dtype), torch.randn(3, 5, generator=generator).to(dtype))
        for _ in range(num)
    ]


def tensor_backward(nvme: str, *, use_reentrant: bool, **job: Any) -> None:
    """Three steps of `output.backward(gradient=...)` through checkpoints inside units with a frozen norm."""
    with Twins(seeded(Tower, use_reentrant), nvme, num_micro_batches=2, **job) as twins:
        for step in range(3):
            own, everybodys = twins.batches(vectors, step)
            for x, gradient in own:
                twins.engine(x).backward(gradient=gradient)
            for x, gradient in everybodys:
                twins.plain(x).backward(gradient=gradient / twins.num_in_step)
            twins.require_same_gradients()
            twins.step()
        twins.require_same_states()


def two_losses_of_one_forward(nvme: str, **job: Any) -> None:
    """Two backward passes through one graph are one micro-batch: with retain_graph, through engine.backward and torch."""
    with Twins(seeded(TwoHeads), nvme, num_micro_batches=2, **job) as twins:
        for step in range(2):
            own, everybodys = twins.batches(vectors, step)
            for number, (x, _) in enumerate(own):
                losses = twins.engine(x)
                if number:
                    losses["left"].backward(retain_graph=True)
                    losses["right"].backward()
                else:
                    twins.engine.backward(losses["left"], retain_graph=True)
                    twins.engine.backward(losses["right"])
                assert twins.engine.is_gradient_accumulation_boundary() == bool(number)
            assert twins.engine.micro_steps == 2 * (step + 1)
            for x, _ in everybodys:
                losses = twins.plain(x)
                ((losses["left"] + losses["right"]) / twins.num_in_step).backward()
            twins.require_same_gradients()
            twins.step()
        twins.require_same_states()


def one_loss_of_two_forwards(nvme: str, **job: Any) -> None:
    """A contrastive loss over two forward passes is backpropagated once, through both."""
    with Twins(seeded(Tower), nvme, **job) as twins:
        for step in range(2):
            own, everybodys = twins.batches(vectors, step, 2)
            (one, _), (other, _) = own
            twins.engine.backward((twins.engine(one) - twins.engine(other)).square().mean())
            for (one, _), (other, _) in zip(everybodys[::2], everybodys[1::2], strict=True):
                ((twins.plain(one) - twins.plain(other)).square().mean() / twins.num_in_step).backward()
            twins.require_same_gradients()
            twins.step()
        twins.require_same_states()


def coalesced_backwards(nvme: str, **job: Any) -> None:
    """Three backward passes inside coalesce_grad_reduction are one step over their sum, whatever the configured count."""
    with Twins(seeded(Tower), nvme, **job) as twins:
        for step in range(2):
            own, everybodys = twins.batches(vectors, step, 3)
            with twins.engine.coalesce_grad_reduction():
                for x, gradient in own:
                    twins.engine.backward((twins.engine(x) * gradient).mean())
                    assert not twins.engine.is_gradient_accumulation_boundary()
            for x, gradient in everybodys:
                ((twins.plain(x) * gradient).mean() / twins.num_in_step).backward()
            twins.require_same_gradients()
            twins.step()
            assert twins.engine.global_steps == step + 1
        twins.require_same_states()


def undivided_losses(nvme: str, **job: Any) -> None:
    """Without scale_wrt_gas the gradient is the sum over a rank's micro-batches; what comes back is the loss itself."""
    with Twins(seeded(Tower), nvme, num_micro_batches=2, **job) as twins:
        own, everybodys = twins.batches(vectors, 0)
        for x, gradient in own:
            loss = (twins.engine(x) * gradient).mean()
            assert torch.equal(twins.engine.backward(loss, scale_wrt_gas=False), loss.detach())
        for x, gradient in everybodys:
            ((twins.plain(x) * gradient).mean() / twins.engine.world_size).backward()
        twins.require_same_gradients()
        twins.step()
        twins.require_same_states()


def scaled_losses(nvme: str, **job: Any) -> None:
    """engine.scale(loss).backward() is engine.backward(loss) bit for bit, alone, in sums of losses, and inside it."""
    gradients = []
    for way in range(3):
        with Twins(seeded(TwoHeads), nvme, num_micro_batches=2, **job) as twins:
            engine = twins.engine
            for x, _ in twins.batches(vectors, 0)[0]:
                losses = engine(x)
                if way == 0:
                    engine.backward(losses["left"] + losses["right"])
                elif way == 1:
                    (engine.scale(losses["left"]) + engine.scale(losses["right"])).backward()
                else:
                    engine.scale(losses["left"] + losses["right"]).backward()
            gradients.append([utils.safe_get_full_grad(parameter) for parameter in engine.module.parameters()])
    for others in gradients[1:]:
        for ours, first in zip(others, gradients[0], strict=True):
            assert ours is not None
            assert first is not None
            assert torch.equal(ours, first)


def frozen_base(nvme: str, **job: Any) -> None:
    """Adapters on a frozen decoder, plain backward: the trained gradients are torch's, the frozen ones are none."""
    with Twins(seeded(LoraGpt), nvme, num_micro_batches=2, **job) as twins:
        for step in range(2):
            own, everybodys = twins.batches(TINY_GPT.batches, step)
            for batch in own:
                twins.engine(*batch).backward()
            for batch in everybodys:
                (twins.plain(*batch) / twins.num_in_step).backward()
            twins.require_same_gradients()
            twins.step()
        twins.require_same_states()
