"""What units may take and give: any nesting of tensors, dataclasses, transformers' outputs, the input itself, nothing."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from harness import ABSENT, Harness, require_same, same_in_every_way, vector_loss
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    """A plain dataclass with a tensor and something else."""

    hidden: torch.Tensor
    note: str
    extra: dict


@dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    hidden: torch.Tensor


class Giving(nn.Module):
    """A linear map that gives its result in a container and takes such a container."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.pack, self.unpack = pack, unpack

    def forward(self, value):
        x = self.unpack(value) if not isinstance(value, torch.Tensor) else value
        return self.pack(torch.tanh(self.linear(x)))


class Chain(nn.Module):
    """Three such units; what one gives the next one takes."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.blocks = nn.ModuleList(Giving(pack, unpack) for _ in range(3))
        self.unpack = unpack

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.unpack(x)


KINDS = {
    "tuple": (lambda y: (y, 1, None), lambda v: v[0]),
    "list": (lambda y: [y, [y * 2]], lambda v: v[1][0] - v[0]),
    "dict": (lambda y: {"y": y, "n": 3, "double": y * 2}, lambda v: v["double"] - v["y"]),
    "ordered dict": (lambda y: OrderedDict(y=y), lambda v: v["y"]),
    "named tuple": (lambda y: Pair(y, y.detach()), lambda v: v.left + 0 * v.right),
    "dataclass": (lambda y: Record(y, "note", {"more": [y + 1]}), lambda v: v.hidden + v.extra["more"][0]),
    "frozen dataclass": (lambda y: Frozen(y), lambda v: v.hidden),
    "model output": (lambda y: BaseModelOutput(last_hidden_state=y, hidden_states=(y, y)), lambda v: v.last_hidden_state),
    "twice the same": (lambda y: (y, y), lambda v: v[0] + v[1]),
    "with indices": (lambda y: (y, y.argmax(dim=-1)), lambda v: v[0] * v[1].unsqueeze(-1)),
    "a view": (lambda y: (y.view(-1, 4, 4).transpose(1, 2),), lambda v: v[0].transpose(1, 2).reshape(-1, 16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_containers_in_and_out(kind):
    """The container arrives with its own type and everything in it, and gradients flow through it."""
    torch.manual_seed(0)
    model = Chain(*KINDS[kind])
    same_in_every_way(model, vector_loss(3), 3, against_torch=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_their_own_type(kind):
    """What a unit gives is what its module gives."""
    torch.manual_seed(0)
    model = Chain(*KINDS[kind])
    expected = type(model.blocks[0](torch.ones(2, 16)))
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
    harness = Harness(model)
    harness.step(vector_loss(1), 1)
    assert {type(value) for value in seen} == {expected}
    if kind == "dataclass":
        assert seen[0].note == "note"
    if kind == "twice the same":
        assert seen[0][0] is seen[0][1]


class Passing(nn.Module):
    """Returns its input itself beside its result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, y=None):
        return x, self.linear(x) if y is None else self.linear(y)


class PassingModel(nn.Module):
    """Adds both."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x):
        x, y = self.blocks[0](x)
        x, y = self.blocks[1](x, y=torch.tanh(y))
        x, y = self.blocks[2](x, y=torch.tanh(y))
        return x + y


def test_the_input_may_be_returned():
    """A unit may give back what it got."""
    torch.manual_seed(0)
    same_in_every_way(PassingModel(), vector_loss(3), 3, against_torch=1e-5)


class Silent(nn.Module):
    """Returns nothing, or nothing with a gradient."""

    def __init__(self, result):
        super().__init__()
        self.linear, self.result = nn.Linear(16, 16), result

    def forward(self, x):
        y = self.linear(x)
        return {"none": None, "number": 3.0, "detached": y.detach(), "integer": y.argmax()}[self.result]


class SilentModel(nn.Module):
    """Calls such a unit and goes on without it."""

    def __init__(self, result):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), Silent(result), nn.Linear(16, 16)])

    def forward(self, x):
        x = torch.tanh(self.blocks[0](x))
        value = self.blocks[1](x)
        return self.blocks[2](x) + (0.0 if value is None else 0.1 * value)


@pytest.mark.parametrize("result", ["none", "number", "detached", "integer"])
def test_results_without_gradient(result):
    """Such a unit has no backward and its parameters are untouched."""
    torch.manual_seed(0)
    steps = same_in_every_way(SilentModel(result), vector_loss(3), 3, against_torch=1e-5)
    assert not [name for name in steps[0][1] if name.startswith("blocks.1")]


class Routed(nn.Module):
    """Takes keyword arguments of many kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, /, *others, scale, mask=None, options=None, **more):
        y = self.linear(x) * scale + more["shift"]
        for other in others:
            y = y + other
        return y.masked_fill(mask, 0.0) if options["mask"] else y


class RoutedModel(nn.Module):
    """Passes arguments by position and by keyword."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.blocks = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, x):
        mask = x > 1
        for block in self.blocks:
            x = block(x, x, 2 * x, scale=self.scale, mask=mask, options={"mask": True}, shift=x.mean())
        return x


def test_keyword_arguments():
    """Positional, variable and keyword arguments, a parameter of no unit and a mask among them."""
    torch.manual_seed(0)
    same_in_every_way(RoutedModel(), vector_loss(3), 3, against_torch=1e-5)


def test_inputs_that_require_a_gradient_get_it():
    """Embeddings that the user passes in have their gradient afterwards, as in torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    xs = [torch.randn(2, 16, requires_grad=True) for _ in range(3)]

    def forward_loss(module, k):
        return module(xs[k]).square().mean()

    for k in range(3):
        (forward_loss(model, k) / 3).backward()
    expected = [x.grad for x in xs]
    for x in xs:
        x.grad = None
    for schedule in ("vertical", "horizontal"):
        harness = Harness(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), residency=ABSENT)
        for name, value in model.state_dict().items():
            next(values for values in harness.weights.values.values() if name in values)[name].copy_(value)
        harness.step(forward_loss, 3, schedule=schedule)
        require_same(dict(enumerate(x.grad for x in xs)), dict(enumerate(expected)))
        for x in xs:
            x.grad = None
