"""Tensors that enter or leave a unit other than as argument and result: an error that names it, never a wrong gradient."""

import pytest
import torch
from harness import (
    ABSENT,
    KEPT,
    Block,
    Harness,
    TinyModel,
    require_close,
    require_same,
    same_in_every_way,
    token_loss,
    torch_step,
)

from infinity.errors import InputChangedError, SideChannelError

SHARED = []


class Kept(Block):
    """Keeps its hidden state as an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.hidden = y
        return y


class KeptDeep(Block):
    """Keeps a tensor with a graph inside a list of an inner module."""

    def forward(self, x):
        y = super().forward(x)
        self.up.seen = {"last": [y.mean()]}
        return y


class Global(Block):
    """Appends to a list of the module it is defined in."""

    def forward(self, x):
        y = super().forward(x)
        SHARED.append(y.square().mean())
        return y


class Cache:
    """What a key-value cache looks like to a unit."""

    def __init__(self):
        self.keys = []


class CacheModel(TinyModel):
    """Passes a cache object to its blocks."""

    def forward(self, tokens, targets):
        cache, x = Cache(), self.embed(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return self.loss(x, targets) + sum(key.mean() for key in cache.keys)


class CacheBlock(Block):
    """Stores a tensor in its cache argument."""

    def forward(self, x, cache):
        cache.keys.append(self.norm(x))
        return super().forward(x)


class RouterModel(TinyModel):
    """Passes a list to its blocks, to which they append their router losses."""

    def forward(self, tokens, targets):
        losses, x = [], self.embed(tokens)
        for block in self.blocks:
            x = block(x, losses)
        return self.loss(x, targets) + 0.1 * sum(losses)


class RouterBlock(Block):
    """Appends to a list among its arguments."""

    def forward(self, x, losses):
        y = super().forward(x)
        losses.append(y.square().mean())
        return y


class ClosureModel(TinyModel):
    """Gives its last block the embedding's output behind its back."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        self.blocks[-1].extra = x
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)


class ClosureBlock(Block):
    """Uses a tensor that is none of its arguments."""

    extra = None

    def forward(self, x):
        return super().forward(x) + (self.extra if self.extra is not None else 0)


def _with_hook():
    model, seen = TinyModel(), []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(output))
    return model


KINDS = {
    "attribute": (lambda: TinyModel(block=lambda: Kept(16)), "'blocks.0.hidden'"),
    "inner attribute": (lambda: TinyModel(block=lambda: KeptDeep(16)), "'blocks.0.up.seen'"),
    "global": (lambda: TinyModel(block=lambda: Global(16)), "outside the unit"),
    "cache": (lambda: CacheModel(block=lambda: CacheBlock(16)), "argument of type Cache"),
    "router list": (lambda: RouterModel(block=lambda: RouterBlock(16)), "list or dict among its arguments"),
    "closure": (lambda: ClosureModel(block=lambda: ClosureBlock(16)), "none of its arguments"),
    "hook": (_with_hook, "a hook, a list"),
}


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("kind", KINDS)
def test_side_channels_are_errors(kind, schedule):
    """Each way around the return value is a SideChannelError that names the unit and the place."""
    build, place = KINDS[kind]
    torch.manual_seed(0)
    SHARED.clear()
    harness = Harness(build(), residency=ABSENT)
    with pytest.raises(SideChannelError, match="Unit 'blocks") as caught:
        harness.step(token_loss(3), 3, schedule=schedule)
    assert place in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["attribute", "inner attribute", "cache", "closure", "hook"])
def test_side_channels_work_where_weights_stay(kind):
    """Under ordinary autograd the same models are trained as torch does."""
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    _, expected = torch_step(model, token_loss(2), 2)
    _, gradients = Harness(model, residency=KEPT).step(token_loss(2), 2)
    require_close(gradients, expected, 1e-5)


def test_training_goes_on_after_the_error():
    """When the leak is gone the next step equals that of a model that never leaked."""
    torch.manual_seed(0)
    model = TinyModel()
    torch.manual_seed(0)
    fresh = Harness(TinyModel())
    harness = Harness(model)
    leak = []
    hook = model.blocks[2].register_forward_pre_hook(lambda module, args: leak.append(module.norm.weight * 2))
    inner = model.blocks[2].down.register_forward_hook(lambda module, args, output: leak.append(output))
    hook.remove()
    with pytest.raises(SideChannelError):
        harness.step(token_loss(3), 3)
    inner.remove()
    leak.clear()
    harness.randomness.step = 0
    losses, gradients = harness.step(token_loss(3), 3)
    expected_losses, expected = fresh.step(token_loss(3), 3)
    assert losses == expected_losses
    require_same(gradients, expected)


class Statistics(Block):
    """Keeps detached statistics, which no gradient is lost with."""

    def forward(self, x):
        y = super().forward(x)
        self.last_mean = y.detach().mean()
        self.history = [*getattr(self, "history", [])[-3:], float(y.detach().abs().max())]
        return y


def test_detached_statistics_may_be_kept():
    """An attribute without a graph is no side channel."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(block=lambda: Statistics(16)), token_loss(3), 3, against_torch=1e-5)


class Appending(Block):
    """Appends a detached tensor to a list among its arguments."""

    def forward(self, x, seen):
        seen.append(x.detach().mean())
        return super().forward(x)


class AppendingModel(TinyModel):
    """Gives its blocks a list."""

    def forward(self, tokens, targets):
        seen, x = [], self.embed(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return self.loss(x, targets)


def test_a_changed_list_argument_is_an_error():
    """A unit sees copies of its list arguments: what it puts there would be lost, so it is refused."""
    torch.manual_seed(0)
    with pytest.raises(InputChangedError, match=r"Unit 'blocks\.0' changes a list"):
        Harness(AppendingModel(block=lambda: Appending(16))).step(token_loss(2), 2)


def test_a_parameter_of_no_module_inside_is_an_error():
    """A unit that uses the root group's parameter through a closure is refused: the rerun would use another leaf."""
    torch.manual_seed(0)
    model = TinyModel()

    class Scaled(Block):
        def forward(self, x):
            return super().forward(x) * model.scale

    model.blocks[1] = Scaled(16)
    with pytest.raises(SideChannelError, match="belongs to no module inside it"):
        Harness(model).step(token_loss(2), 2)


def test_a_users_own_leaf_gets_its_gradient():
    """A leaf tensor that is no parameter of the model may be used inside a unit, and is given its gradient as in torch."""
    torch.manual_seed(0)
    prompt = torch.randn(16, requires_grad=True)

    class Prompted(Block):
        def forward(self, x):
            return super().forward(x + prompt)

    def build():
        torch.manual_seed(1)
        return TinyModel(block=lambda: Prompted(16))

    torch_step(build(), token_loss(2), 2)
    expected, prompt.grad = prompt.grad, None
    Harness(build()).step(token_loss(2), 2)
    torch.testing.assert_close(prompt.grad, expected, rtol=1e-5, atol=1e-7)
