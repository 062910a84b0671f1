"""A walk over a model whose weights lie in plain tensors: the schedules without tiers, for comparison with plain torch."""

from __future__ import annotations

import torch
from torch import nn

from infinity.store.layout import ParameterSpec, shard_layout
from infinity.telemetry.recorder import Recorder
from infinity.zero.absent import AbsentParameter
from infinity.zero.binding import root_bindings, unit_bindings
from infinity.zero.gradients import GradientSums
from infinity.zero.horizontal import run_horizontally
from infinity.zero.micro_batch import MicroBatch
from infinity.zero.order import UnitOrder
from infinity.zero.randomness import Randomness
from infinity.zero.shard import Residency, Shard
from infinity.zero.unit_call import UnitRuntime
from infinity.zero.units import cut_model
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.walk import Walk

CPU = torch.device("cpu")


class PlainWeights:
    """Every shard's weights in tensors that never move; counts visits."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, torch.Tensor]] = {}
        self.acquired: list[int] = []
        self.held: dict[int, int] = {}

    def acquire(self, shard):
        self.acquired.append(shard)
        self.held[shard] = self.held.get(shard, 0) + 1
        return self.values[shard]

    def release(self, shard):
        self.held[shard] -= 1

    def expect(self, order):
        self.order = tuple(order)


class Collected:
    """Takes final gradients, unrounded, by parameter name."""

    def __init__(self, shards):
        self.shards = shards
        self.flats = {}
        self.touched = set()
        self.published = []

    def flat(self, shard):
        return self.flats.setdefault(shard, torch.zeros(self.shards[shard].layout.num_state_elements))

    def publish(self, shard, touched):
        self.published.append(self.shards[shard].layout.name)
        self.touched |= touched

    def gradients(self):
        found = {}
        for shard in self.shards:
            for section in shard.layout.sections:
                for segment in section.segments if section.trainable else ():
                    if segment.parameter in self.touched:
                        start = section.state_offset + segment.offset
                        shape = shard.layout.spec(segment.parameter).shape
                        found[segment.parameter] = self.flats[shard.index][start : start + segment.length].view(shape).clone()
        return found


class Harness:
    """One model, walked in vertical or horizontal order, with absent or kept weights."""

    def __init__(self, model, *, absent=True, patterns=(), check=True, seed=0):
        self.model = model
        self.recorder = Recorder()
        self.units, groups = cut_model(model, patterns)
        self.weights = PlainWeights()
        self.shards = []
        for group in groups:
            self.shards.append(self._shard(group, absent))
        self.target = Collected(self.shards)
        self.sums = GradientSums(self.shards, self.target)
        self.randomness = Randomness(seed, CPU)
        runtimes = [
            UnitRuntime(
                unit, unit.module.forward, unit_bindings(unit, self.shards), self.weights, self.sums, self.randomness,
                ("cpu",), check, lambda: None,
            )
            for unit in self.units
        ]  # fmt: skip
        self.walk = Walk(
            model, runtimes, [absent] * len(runtimes), root_bindings(self.units, self.shards), self.weights, self.sums,
            self.randomness,
        )  # fmt: skip
        self.order = UnitOrder(len(self.units))
        self.walk.attach()

    def _shard(self, group, absent):
        specs = [
            ParameterSpec(use.name, tuple(use.parameter.shape), str(use.parameter.dtype)[6:], use.parameter.requires_grad)
            for use in group.uses
        ]
        layout = shard_layout(group.index, group.name, specs, tile_elements=1024)
        self.weights.values[group.index] = {use.name: use.parameter.detach() for use in group.uses}
        outside = {}
        for use in group.uses:
            if not group.units:
                outside[use.name] = use.parameter
                continue
            stand_in = AbsentParameter.standing_for(
                use.name, group.name, use.parameter.shape, use.parameter.dtype, CPU, use.parameter.requires_grad
            )
            outside[use.name] = stand_in
            for place in use.places:
                place.module._parameters[place.attribute] = stand_in
        residency = Residency.RESIDENT if not group.units else Residency.ABSENT if absent else Residency.KEPT
        return Shard(group, layout, residency, outside)

    def step(self, forward_loss, num_micro_batches, *, schedule="vertical", coefficients=None):
        """Run one step; return (losses, gradients by parameter name)."""
        batches = [MicroBatch(k, k) for k in range(num_micro_batches)]
        coefficients = coefficients or [1.0 / num_micro_batches] * num_micro_batches
        self.target.touched.clear()
        with self.randomness.borrowed():
            if schedule == "vertical":
                vertical = VerticalSchedule(self.walk, self.weights, self.order, self.recorder, CPU)
                losses = vertical.run(lambda batch: forward_loss(batch.index), batches, coefficients)
            else:
                losses = run_horizontally(
                    self.walk, self.weights, self.order, lambda batch: forward_loss(batch.index), batches, coefficients
                )
        self.randomness.step += 1
        return [float(loss) for loss in losses], self.target.gradients()


def torch_step(model, forward_loss, num_micro_batches):
    """The same by plain accumulation."""
    model.zero_grad()
    losses = []
    for k in range(num_micro_batches):
        loss = forward_loss(k)
        (loss / num_micro_batches).backward()
        losses.append(float(loss.detach()))
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Block(nn.Module):
    """LayerNorm, two linears, a residual."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm and head; `tied` shares the embedding with the head."""

    def __init__(self, vocab=37, width=16, num_blocks=3, tied=False, dropout=0.0, between=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.between = nn.Dropout(between)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = self.between(block(x)) * self.scale
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def token_batches(num, vocab=37, size=2, length=8, seed=3):
    """Return `num` pairs of tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(vocab, (size, length), generator=generator), torch.randint(vocab, (size, length), generator=generator))
        for _ in range(num)
    ]
