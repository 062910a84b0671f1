"""The small models of the cases, their batches, and one way to train any of them that returns everything comparable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.engine import Engine, StepResult
from infinity.memory.ledger import LedgerLine

VOCABULARY, SEQUENCE = 257, 32


class OddMlp(nn.Module):
    """Layers whose byte sizes are no multiples of 512, a head of one output, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1000)
        self.second = nn.Linear(1000, 7)
        self.head = nn.Linear(256, 1)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        out = self.second(hidden) * self.temperature + self.head(hidden[:, :256])
        return F.mse_loss(out.float(), y.float())


class GptBlock(nn.Module):
    """Pre-norm attention and a feed-forward layer; with `rank`, low-rank adapters beside the feed-forward layer."""

    def __init__(self, width: int, num_heads: int, dropout: float, rank: int = 0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.lora_a = nn.Linear(width, rank, bias=False) if rank else None
        self.lora_b = nn.Linear(rank, width, bias=False) if rank else None

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        h = self.norm_2(x)
        y = self.down(F.gelu(self.up(h)))
        if self.lora_a is not None and self.lora_b is not None:
            y = y + self.lora_b(self.lora_a(h))
        return x + self.dropout(y) * gain.to(x.dtype)


class TinyGpt(nn.Module):
    """A decoder with a tied head, LayerNorm, and one buffer of each kind."""

    positions: torch.Tensor
    gain: torch.Tensor

    def __init__(
        self, *, vocabulary: int = VOCABULARY, width: int = 48, num_layers: int = 2, num_heads: int = 3, tied: bool = True,
        dropout: float = 0.0, rank: int = 0, shared_layer: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GptBlock(width, num_heads, dropout, rank) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.shared_layer = shared_layer
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(SEQUENCE).float() / SEQUENCE, persistent=False)
        self.register_buffer("gain", torch.tensor(1.25))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.positions[: tokens.shape[1], None].to(x.dtype)
        for block in self.blocks:
            x = block(x, self.gain)
        if self.shared_layer:
            x = self.blocks[0](x, self.gain)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class LoraGpt(TinyGpt):
    """A frozen decoder with rank-4 adapters that are trained, and its embedding too where asked."""

    def __init__(self, *, trainable_embedding: bool = False) -> None:
        super().__init__(rank=4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name or (trainable_embedding and name == "embed.weight"))


class Branchy(nn.Module):
    """Two branches of which the input chooses one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 40)
        self.branches = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)])
        self.head = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, branch: int) -> torch.Tensor:
        x = torch.tanh(self.branches[branch](torch.tanh(self.stem(x))))
        return F.mse_loss(self.head(x).float(), y.float())


class Bulk(nn.Module):
    """A stack of square layers: nothing but weights."""

    def __init__(self, *, width: int = 64, num_layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


MicroBatch = tuple[Any, ...]


@dataclass(frozen=True)
class Kit:
    """A model of the kit and where its micro-batches come from."""

    name: str
    make: Callable[[], nn.Module]
    micro_batch: Callable[[torch.Generator, int], MicroBatch]  # generator, step

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model, always with the same values for one seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make()

    def batches(self, step: int, num: int, dtype: torch.dtype = torch.float32) -> list[MicroBatch]:
        """Return the micro-batches of a step; floating-point tensors have the dtype that the model computes in."""
        generator = torch.Generator().manual_seed(1000 + step)
        drawn = [self.micro_batch(generator, step) for _ in range(num)]
        return [tuple(_cast(value, dtype) for value in micro_batch) for micro_batch in drawn]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _tokens(generator: torch.Generator, step: int, vocabulary: int = VOCABULARY) -> MicroBatch:
    drawn = torch.randint(vocabulary, (2, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def _vectors(width: int, num_outputs: int) -> Callable[[torch.Generator, int], MicroBatch]:
    def draw(generator: torch.Generator, step: int) -> MicroBatch:
        return torch.randn(3, width, generator=generator), torch.randn(3, num_outputs, generator=generator)

    return draw


def _branch_of_step(generator: torch.Generator, step: int) -> MicroBatch:
    return (*_vectors(24, 5)(generator, step), step % 2)


def _one_vector(width: int) -> Callable[[torch.Generator, int], MicroBatch]:
    return lambda generator, step: (torch.randn(4, width, generator=generator),)


BULK = Kit("bulk", Bulk, _one_vector(64))
TINY_GPT = Kit("tiny-gpt", TinyGpt, _tokens)
DROPOUT_GPT = Kit("dropout-gpt", lambda: TinyGpt(dropout=0.1), _tokens)
ODD_MLP = Kit("odd-mlp", OddMlp, _vectors(512, 7))
BRANCHY = Kit("branchy", Branchy, _branch_of_step)
LORA_GPT = Kit("lora-gpt", LoraGpt, _tokens)
LORA_GPT_EMBEDDING = Kit("lora-gpt-embedding", lambda: LoraGpt(trainable_embedding=True), _tokens)
BIG_EMBED = Kit(
    "big-embed", lambda: TinyGpt(vocabulary=50_000, width=64, num_heads=4), lambda g, step: _tokens(g, step, 50_000)
)
KITS = (ODD_MLP, TINY_GPT, DROPOUT_GPT, LORA_GPT, LORA_GPT_EMBEDDING, BRANCHY, BULK)


def kit_of(name: str) -> Kit:
    return next(kit for kit in (*KITS, BIG_EMBED) if kit.name == name)


def settings(
    nvme: Path, *, optim: str = "cpu", params: str = "cpu", bf16: bool = True, num_micro_batches: int = 1, clip: float = 1.0,
    lr: float = 1e-2, weight_decay: float = 0.1, scheduler: Mapping[str, Any] | None = None,
    fp16: Mapping[str, Any] | None = None, **own: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a configuration; `own` are keys of the section `infinity`. With keys for `fp16` it is a run in fp16."""
    return {
        "gradient_accumulation_steps": num_micro_batches,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,
        "bf16": {"enabled": bf16 and fp16 is None},
        "fp16": {"enabled": fp16 is not None, **(fp16 or {})},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": weight_decay}},
        "scheduler": dict(scheduler or {}),
        "zero_optimization": {"offload_optimizer": {"device": optim}, "offload_param": {"device": params}},
        "infinity": {"nvme": [str(nvme)], "cpu_memory": "512MiB", "tile_bytes": "16KiB", "check": True, **own},
    }


def open_engine(model: nn.Module, config: Mapping[str, Any], **options: Any) -> Engine:
    """Return the engine of `initialize`, with a little memory set aside for activations."""
    options.setdefault("activation_bytes", 1 << 20)
    return infinity.initialize(model=model, config=config, **options).engine


@dataclass
class Run:
    """What a run leaves: comparable bit for bit with another's."""

    losses: list[tuple[float, ...]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: tuple[LedgerLine, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)


def compute_dtype(config: Mapping[str, Any]) -> torch.dtype:
    if config["fp16"]["enabled"]:
        return torch.float16
    return torch.bfloat16 if config["bf16"]["enabled"] else torch.float32


def train(kit: Kit, config: Mapping[str, Any], *, num_steps: int = 3, **options: Any) -> Run:
    """Train a fresh model with `train_batch`; return what came out."""
    with open_engine(kit.build(), config, **options) as engine:
        return train_engine(engine, kit, config, range(num_steps))


def train_engine(engine: Engine, kit: Kit, config: Mapping[str, Any], steps: Sequence[int]) -> Run:
    """Take the given steps with an engine that is there; return what came out."""
    run = Run()
    for step in steps:
        result = engine.train_batch(kit.batches(step, config["gradient_accumulation_steps"], compute_dtype(config)))
        run.results.append(result)
        run.losses.append(result.losses)
    run.state = engine.state_dict()
    run.memory = engine.memory_report()
    run.counters = engine.recorder.counters()
    return run


def train_familiarly(kit: Kit, config: Mapping[str, Any], *, num_steps: int = 3, **options: Any) -> Run:
    """The same with the loop that users know: forward, backward, step."""
    run = Run()
    with open_engine(kit.build(), config, **options) as engine:
        for step in range(num_steps):
            losses = []
            for micro_batch in kit.batches(step, config["gradient_accumulation_steps"], compute_dtype(config)):
                loss = engine(*micro_batch)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            run.losses.append(tuple(losses))
        run.state = engine.state_dict()
    return run


def require_same(run: Run, reference: Run) -> None:
    """Fail unless losses and every parameter and buffer are equal bit for bit; the message names the first that is not."""
    assert run.losses == reference.losses
    assert all(math.isfinite(loss) for losses in run.losses for loss in losses)
    require_same_state(run.state, reference.state)


def require_same_state(state: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> None:
    assert set(state) == set(reference)
    different = [name for name, value in reference.items() if not torch.equal(state[name], value)]
    assert different == []


def finish_ahead(engine: Engine) -> None:
    """Begin all that the slots can take ahead for the next step, and let it come in.

    The engine begins it as slots become free: without this it would depend on the moment how much of it is counted already.
    """
    weights = engine._parts.weights
    weights.settle()  # now every slot is free for the first visits of the next step
    weights.rewind()
    weights.settle()
