"""The tail: from the last unit on, forward and straight backward, so that two micro-batches never have logits alive."""

import weakref

import pytest
import torch
from harness import ABSENT, KEPT, Harness, TinyModel, require_close, same_in_every_way, token_loss, torch_step
from torch import nn


class Loss(torch.autograd.Function):
    """A sum whose node lives as long as the graph behind the logits does."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


class LogitCounter(TinyModel):
    """Counts the micro-batches whose logits are alive when the next loss is computed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.alive, self.most = [], 0

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        self.alive = [reference for reference in self.alive if reference() is not None]
        self.alive.append(weakref.ref(logits))
        self.most = max(self.most, len(self.alive))
        return Loss.apply(logits)


@pytest.mark.parametrize("residency", [ABSENT, KEPT])
def test_one_micro_batch_has_logits_at_a_time(residency):
    """With four micro-batches never more than one tensor of logits is alive, in the first step and later."""
    torch.manual_seed(0)
    harness = Harness(LogitCounter(), residency=residency)
    for _ in range(2):
        harness.step(token_loss(4), 4)
        assert harness.model.most == 1
    assert not harness.recorder.counters()["tails_not_separable"]


class EarlyAux(TinyModel):
    """Adds a loss that comes from the first block."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return self.loss(x, targets) + 0.1 * first.square().mean()


def test_a_loss_from_an_early_unit_is_counted():
    """Where the loss reaches an early unit behind the last one's back the tail is not cut off, and that is said."""
    torch.manual_seed(0)
    same_in_every_way(EarlyAux(), token_loss(3), 3, against_torch=1e-5)
    harness = Harness(EarlyAux())
    harness.step(token_loss(3), 3)
    assert harness.recorder.counters()["tails_not_separable"] == 1


class SometimesAux(EarlyAux):
    """Adds the early loss in some steps only."""

    aux = False

    def forward(self, tokens, targets):
        if self.aux:
            return super().forward(tokens, targets)
        return TinyModel.forward(self, tokens, targets)


def test_a_tail_that_stops_being_separable():
    """The graph of such a tail, and the weights in it, wait for the joint backward; gradients are torch's."""
    torch.manual_seed(0)
    model, forward_loss = SometimesAux(), token_loss(3)
    harness = Harness(model)
    harness.step(forward_loss, 3)
    harness.model.aux = True
    _, gradients = harness.step(forward_loss, 3)
    assert harness.recorder.counters()["tails_not_separable"] == 3
    assert set(harness.weights.held.values()) == {0}
    torch.manual_seed(0)
    plain = SometimesAux()
    plain.aux = True
    require_close(gradients, torch_step(plain, forward_loss, 3)[1], 1e-5)


class Hoisted(TinyModel):
    """Reads a parameter of no unit before the blocks and uses it after them."""

    def forward(self, tokens, targets):
        scale = self.scale
        x = self.embed(tokens) * scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * scale.square().sum()


def test_a_parameter_read_early_and_used_in_the_tail():
    """Its gradient from behind the last unit is not lost."""
    torch.manual_seed(0)
    same_in_every_way(Hoisted(), token_loss(3), 3, against_torch=1e-5)


class SkipAroundTheEnd(TinyModel):
    """Ends with a residual around the last unit."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks[:2]:
            x = block(x)
        y = x + self.blocks[2](x)
        return y.square().mean()


def test_a_skip_around_the_last_unit():
    """A residual around the last unit reaches further back, so the gradient takes both ways."""
    torch.manual_seed(0)
    same_in_every_way(SkipAroundTheEnd(), token_loss(3), 3, against_torch=1e-5)


class HookedInput(TinyModel):
    """Scales the gradient of the last unit's input by a hook."""

    def loss(self, x, targets):
        x = self.norm(x)
        x.register_hook(lambda gradient: 0.25 * gradient)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_users_hook_on_the_cut_runs_once():
    """A hook on the tensor at which the tail is cut off changes the gradient once, as in torch."""
    torch.manual_seed(0)
    same_in_every_way(HookedInput(), token_loss(3), 3, against_torch=1e-5)


def test_a_loss_module_with_its_own_parameters():
    """A leaf outside the model, here a learnt temperature, gets the gradient that torch gives it."""
    torch.manual_seed(0)
    temperature = torch.tensor(1.3, requires_grad=True)
    inner = token_loss(3)

    def forward_loss(model, k):
        return inner(model, k) / temperature

    torch_step(TinyModel(), forward_loss, 1)
    temperature.grad = None
    torch.manual_seed(0)
    model = TinyModel()
    for k in range(3):
        (forward_loss(model, k) / 3).backward()
    expected, temperature.grad = temperature.grad, None
    torch.manual_seed(0)
    Harness(TinyModel()).step(forward_loss, 3)
    torch.testing.assert_close(temperature.grad, expected)


def test_no_gradient_at_all_is_an_error():
    """A step in which no loss depends on anything trainable is refused, as torch refuses it."""
    from infinity.errors import ModelError

    model = TinyModel()
    model.requires_grad_(False)
    for schedule in ("vertical", "horizontal"):
        with pytest.raises(ModelError, match="No loss of this step requires a gradient"):
            Harness(model).step(token_loss(2), 2, schedule=schedule)
        model = TinyModel()
        model.requires_grad_(False)


def test_a_model_that_is_one_unit():
    """A single Linear is embedding and head in one."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(3, 4, 16, generator=generator)
    model = nn.Linear(16, 16)
    same_in_every_way(model, lambda module, k: module(xs[k]).square().mean(), 3, against_torch="bits")


def test_a_model_without_units():
    """A model of vectors only has a root group and nothing else."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(3, 4, 16, generator=generator)
    same_in_every_way(nn.LayerNorm(16), lambda module, k: module(xs[k]).pow(3).mean(), 3, against_torch="bits")
