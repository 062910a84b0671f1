"""Models whose ranks differ in what they do, the global batches of every model, and plain PyTorch to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from kit import ODD_MLP, VOCABULARY, Kit, TinyGpt
from torch import Tensor, nn
from torch.nn import functional as F

Rows = tuple[Tensor, ...]  # tensors of the same number of rows

NUM_ROWS = 24  # in a global batch: they divide by every number of ranks and of micro-batches
NUM_LAYERS = 3  # of the decoders: two weight slots do not hold them all
LENGTH = 8  # tokens in a sequence
# Where a gradient is zero but for rounding (the bias of keys), Adam would make a step of the whole lr out of its sign.
EPS = 1e-5
LR = 1e-3
CLIP = 1.0
WEIGHT_DECAY = 0.1
WIDTH, NUM_CLASSES = 24, 4


class UnusedGpt(TinyGpt):
    """A decoder with a tied head and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(num_layers=NUM_LAYERS)
        self.unused = nn.Linear(48, 48)


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MoeBlock(nn.Module):
    """Four experts, of which a row takes the one that its first columns point to; those that no row chose are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_CLASSES))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        normed = self.norm(x)
        gates = self.router(normed).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (classes == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(normed[rows]) * gates[rows, index, None])
        return x + out


class TinyMoe(nn.Module):
    """Two blocks of experts between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, classes)
        return F.mse_loss(self.head(x).float(), y.float())


class Forked(nn.Module):
    """Two branches; the first row chooses which of them a micro-batch takes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.tanh(self.branches[int(classes[0]) % 2](x))
        return F.mse_loss(self.head(x).float(), y.float())


def tokens(generator: torch.Generator, num_rows: int) -> Rows:
    """Return tokens and targets, int64 [num_rows, LENGTH]."""
    drawn = torch.randint(VOCABULARY, (num_rows, LENGTH + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def vectors(generator: torch.Generator, num_rows: int) -> Rows:
    """Return inputs [num_rows, 512] and targets [num_rows, 7]."""
    return torch.randn(num_rows, 512, generator=generator), torch.randn(num_rows, 7, generator=generator)


def classified(generator: torch.Generator, num_rows: int) -> Rows:
    """Return inputs, targets and classes: 0 in the first half of the rows, 1 and 2 in the second; 3 never comes."""
    half = num_rows // 2
    second = 1 + torch.arange(num_rows - half) % 2
    return (
        torch.randn(num_rows, WIDTH, generator=generator),
        torch.randn(num_rows, 3, generator=generator),
        torch.cat([torch.zeros(half, dtype=torch.int64), second]),
    )


@dataclass(frozen=True)
class RankModel:
    """A model and the rows that all ranks together train on."""

    kit: Kit
    draw: Callable[[torch.Generator, int], Rows]

    def batch(self, step: int, num_rows: int) -> Rows:
        """Return the global batch of a step."""
        return self.draw(torch.Generator().manual_seed(1000 + step), num_rows)


def _kit(name: str, make: Callable[[], nn.Module]) -> Kit:
    return Kit(name, make, lambda generator, step: ())


MODELS: Mapping[str, RankModel] = {
    model.kit.name: model
    for model in (
        RankModel(_kit("tiny-gpt", lambda: TinyGpt(num_layers=NUM_LAYERS)), tokens),
        RankModel(ODD_MLP, vectors),
        RankModel(_kit("unused-gpt", UnusedGpt), tokens),
        RankModel(_kit("tiny-moe", TinyMoe), classified),
        RankModel(_kit("forked", Forked), classified),
    )
}


@dataclass(frozen=True)
class TorchRun:
    """What plain PyTorch gives in fp32, by step, and the weights at the end."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    state: Mapping[str, Tensor]


def torch_run(name: str, *, num_steps: int, num_micro_batches: int = 1, num_rows: int = NUM_ROWS) -> TorchRun:
    """Train in one process on the global batch, with torch's AdamW and clip_grad_norm_."""
    model = MODELS[name].kit.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        parts = zip(*(value.chunk(num_micro_batches) for value in MODELS[name].batch(step, num_rows)), strict=True)
        step_losses = [model(*part) / num_micro_batches for part in parts]
        for loss in step_losses:
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in step_losses))
    state = {key: value.detach().clone() for key, value in model.state_dict(keep_vars=False).items()}
    return TorchRun(tuple(losses), tuple(norms), state)
