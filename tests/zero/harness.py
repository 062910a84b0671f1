"""A walk over a model whose weights lie in plain tensors: the schedules without tiers, for comparison with plain torch."""

from __future__ import annotations

import copy

import torch
from torch import nn

from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.unit_size import undivided
from infinity.telemetry.recorder import Recorder
from infinity.zero.absent import AbsentParameter
from infinity.zero.binding import install, root_bindings, unit_bindings
from infinity.zero.gradients import GradientSums, fill
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
ABSENT, KEPT, RESIDENT = Residency.ABSENT, Residency.KEPT, Residency.RESIDENT


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
        self.order = order


class Collected:
    """Takes final gradients, unrounded, by parameter name."""

    def __init__(self, shards):
        self.shards = shards
        self.flats = {}
        self.touched = set()
        self.published = []

    sums_micro_batches = False

    def settle(self):
        """Nothing is under way."""

    def finish(self):
        """Nothing is under way."""

    def publish(self, shard, runs, touched):
        fill(self.flats.setdefault(shard, torch.zeros(self.shards[shard].layout.num_state_elements)), runs)
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
                        flat = self.flats[shard.index][start : start + segment.length]
                        found[segment.parameter] = flat.view(shape).clone()
        return found


class Harness:
    """One model, walked in vertical or horizontal order. `residency` is that of every unit."""

    def __init__(self, model, *, residency=ABSENT, patterns=(), check=True, seed=0):
        self.model = model
        self.recorder = Recorder()
        self.units, groups = cut_model(model, patterns)
        self.weights = PlainWeights()
        self.shards = [self._shard(group, residency) for group in groups]
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
            model, runtimes, [residency is ABSENT] * len(runtimes), root_bindings(self.units, self.shards), self.weights,
            self.sums, self.randomness,
        )  # fmt: skip
        for runtime in runtimes:
            install(runtime.bindings, [binding.outside for binding in runtime.bindings])
        self.order = UnitOrder(len(self.units))
        self.vertical = VerticalSchedule(self.walk, self.weights, self.order, self.recorder, CPU)
        self.walk.attach()

    def _shard(self, group, residency):
        specs = [
            ParameterSpec(use.name, tuple(use.parameter.shape), str(use.parameter.dtype)[6:], use.parameter.requires_grad)
            for use in group.uses
        ]
        layout = shard_layout(group.index, group.name, specs, tile_elements=1024)
        self.weights.values[group.index] = {use.name: use.parameter.detach() for use in group.uses}
        if not group.units or residency is RESIDENT:
            return Shard(group, undivided(layout), RESIDENT, {use.name: use.parameter for use in group.uses})
        outside = {
            use.name: AbsentParameter.standing_for(
                use.name, group.name, use.parameter.shape, use.parameter.dtype, CPU, use.parameter.requires_grad
            )
            for use in group.uses
        }
        return Shard(group, undivided(layout), residency, outside)

    def step(self, forward_loss, num_micro_batches, *, schedule="vertical", coefficients=None):
        """Run one step of `forward_loss(model, index)`; return (losses, gradients by parameter name)."""
        batches = [MicroBatch(k, k) for k in range(num_micro_batches)]
        coefficients = coefficients or [1.0 / num_micro_batches] * num_micro_batches
        self.target.touched.clear()

        def run(batch):
            return forward_loss(self.model, batch.index)

        with self.randomness.borrowed():
            if schedule == "vertical":
                losses = self.vertical.run(run, batches, coefficients)
            else:
                losses = run_horizontally(self.walk, self.weights, self.order, run, batches, coefficients)
        self.randomness.step += 1
        return [float(loss) for loss in losses], self.target.gradients()

    def num_acquired(self, name):
        """Return how often the shard of this name was asked for."""
        return sum(self.shards[shard].layout.name == name for shard in self.weights.acquired)

    def visits(self):
        """Return the names of the shards that were asked for, repetitions in a row as one, without the root group's."""
        names = [self.shards[shard].layout.name for shard in self.weights.acquired if self.shards[shard].group.units]
        return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


def torch_step(model, forward_loss, num_micro_batches, *, fp32_sums=False):
    """The same by plain accumulation; `fp32_sums` sums gradients outside the parameters, in fp32."""
    losses, sums = [], {}
    for k in range(num_micro_batches):
        model.zero_grad()
        loss = forward_loss(model, k)
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / num_micro_batches))
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float() if fp32_sums else parameter.grad
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
    model.zero_grad()
    return losses, sums


def same_in_every_way(model, forward_loss, num_micro_batches, *, num_steps=2, against_torch="bits", **options):
    """Run the model in every schedule and residency, and require the same bits; return the last harness and result.

    `against_torch` is "bits", a relative tolerance, or None. The order is learnt in the first step and known in the second.
    """
    results = {}
    for schedule in ("vertical", "horizontal"):
        for residency in (ABSENT, KEPT, RESIDENT):
            harness = Harness(copy.deepcopy(model), residency=residency, **options)
            results[schedule, residency] = [
                harness.step(forward_loss, num_micro_batches, schedule=schedule) for _ in range(num_steps)
            ]
    expected = results["vertical", ABSENT]
    for way, steps in results.items():
        for step, (losses, gradients) in enumerate(steps):
            assert losses == expected[step][0], (way, step)
            require_same(gradients, expected[step][1], where=(way, step))
    if against_torch is not None:
        losses, gradients = torch_step(model, forward_loss, num_micro_batches, fp32_sums=True)
        if against_torch == "bits":
            assert expected[0][0] == losses
            require_same(expected[0][1], gradients, where="torch")
        else:
            torch.testing.assert_close(expected[0][0], losses, rtol=against_torch, atol=0)
            require_close(expected[0][1], gradients, against_torch)
    return expected


def require_same(gradients, expected, where=""):
    """Require the same parameters and the same bits."""
    assert gradients.keys() == expected.keys(), where
    differing = [name for name, value in expected.items() if not torch.equal(gradients[name], value)]
    assert not differing, (where, differing)


def require_close(gradients, expected, tolerance):
    """Require the same parameters; elements may differ by `tolerance` of the largest in their parameter."""
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=tolerance * float(value.abs().max()), msg=name)


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

    def __init__(self, vocab=37, width=16, num_blocks=3, tied=False, scaled=True, dropout=0.0, between=0.0, block=None):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(block() if block else Block(width, dropout) for _ in range(num_blocks))
        self.between = nn.Dropout(between)
        self.scale = nn.Parameter(torch.full((width,), 1.5)) if scaled else 1.5
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = self.between(block(x)) * self.scale
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def token_batches(num, vocab=37, size=2, length=8, seed=3):
    """Return `num` pairs of tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(vocab, (num, 2, size, length), generator=generator)
    return [(pair[0], pair[1]) for pair in pairs]


def token_loss(num_micro_batches=4, **options):
    """Return forward_loss for models that take (tokens, targets)."""
    batches = token_batches(num_micro_batches, **options)
    return lambda model, k: model(*batches[k])


def vector_loss(num_micro_batches=4, width=16, size=3, seed=5):
    """Return forward_loss for models that take and return vectors."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(num_micro_batches, size, width, generator=generator)
    ys = torch.randn(num_micro_batches, size, width, generator=generator)
    return lambda model, k: nn.functional.mse_loss(model(xs[k]), ys[k])
