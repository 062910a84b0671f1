"""Modules of torch as units, checkpointing inside units, and connections around them."""

import pytest
import torch
from harness import (
    ABSENT,
    KEPT,
    RESIDENT,
    Block,
    Harness,
    TinyModel,
    require_close,
    same_in_every_way,
    token_loss,
    torch_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ModelError


class Recurrent(nn.Module):
    """Embedding, LSTM and head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.again = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 37)

    def forward(self, tokens, targets):
        hidden, (h, _) = self.rnn(self.embed(tokens))
        hidden, _ = self.again(hidden, h[:1])
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_recurrent_modules():
    """An LSTM, which keeps a second list of its weights, is a unit like any other."""
    torch.manual_seed(0)
    same_in_every_way(Recurrent(), token_loss(3), 3, against_torch=1e-5)


def test_recurrent_modules_hold_no_weights_between_calls():
    """Their own list holds absent parameters too, so that no old weight stays in memory."""
    from infinity.zero.absent import AbsentParameter

    harness = Harness(Recurrent())
    assert all(isinstance(weight, AbsentParameter) for weight in harness.model.rnn._flat_weights)
    harness.step(token_loss(2), 2)
    assert all(isinstance(weight, AbsentParameter) for weight in harness.model.rnn._flat_weights)


class Encoder(nn.Module):
    """torch's own Transformer encoder."""

    def __init__(self, norm_first=True):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 37)

    def forward(self, tokens, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.encoder(self.embed(tokens), mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first):
    """Training and evaluation of nn.TransformerEncoder, which looks at the weights of its layers from outside."""
    torch.manual_seed(0)
    same_in_every_way(Encoder(norm_first), token_loss(3), 3, against_torch=1e-5)
    model = Encoder(norm_first).eval()
    with torch.no_grad():
        expected = token_loss(1)(model, 0)
        harness = Harness(model)
        torch.testing.assert_close(token_loss(1)(harness.model, 0), expected)


def test_whole_transformer():
    """Encoder and decoder, whose layers all get the encoder's output."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(37, 16)
            self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 37)

        def forward(self, tokens, targets):
            hidden = self.transformer(self.embed(tokens), self.embed(targets))
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    same_in_every_way(Model(), token_loss(3), 3, against_torch=1e-5)


class Checkpointed(Block):
    """Recomputes its inside in backward."""

    use_reentrant = False

    def forward(self, x):
        def inside(x):
            return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

        return x + self.drop(checkpoint(inside, x, use_reentrant=self.use_reentrant))


class CheckpointedReentrant(Checkpointed):
    """The same with the older kind."""

    use_reentrant = True


@pytest.mark.parametrize("residency", [ABSENT, KEPT, RESIDENT])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrant])
def test_checkpoint_inside_a_unit(kind, residency):
    """A part that a unit recomputes itself finds the weights in their places when it runs in backward, wherever they are."""
    torch.manual_seed(0)
    model, forward_loss = TinyModel(block=lambda: kind(16, 0.1), scaled=False), token_loss(3)
    for block in model.blocks:
        block.drop.p = 0.0
    losses, expected = torch_step(model, forward_loss, 3)
    harness = Harness(model, residency=residency)
    held = dict(harness.model.named_parameters())
    for schedule in ("vertical", "horizontal"):
        own, gradients = harness.step(forward_loss, 3, schedule=schedule)
        assert own == losses
        require_close(gradients, expected, 1e-6)
        assert all(held[name] is parameter for name, parameter in harness.model.named_parameters())


class LastIsCheckpointed(nn.Module):
    """A unit that recomputes itself and is followed by the loss alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.blocks = nn.ModuleList(CheckpointedReentrant(16) for _ in range(2))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + targets.sum() * 0.0


@pytest.mark.parametrize("residency", [ABSENT, KEPT, RESIDENT])
def test_a_reentrant_checkpoint_in_the_last_unit(residency):
    """Torch refuses such a backward unless it goes to the leaves: the tail waits for the joint backward."""
    torch.manual_seed(0)
    model, forward_loss = LastIsCheckpointed(), token_loss(3)
    losses, expected = torch_step(model, forward_loss, 3)
    own, gradients = Harness(model, residency=residency).step(forward_loss, 3)
    assert own == losses
    require_close(gradients, expected, 1e-6)


class GradientInForward(TinyModel):
    """Between two calls of a block that recomputes itself comes a gradient through the first of them."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        first = self.blocks[0](x)
        slope = torch.autograd.grad(first.square().sum(), x, retain_graph=True)[0]
        return self.loss(self.blocks[0](x + 0.1 * slope.detach()), targets)


def test_a_gradient_taken_in_forward_leaves_the_next_call_alone():
    """Backward through an earlier call of a unit, while the forward pass goes on, takes no weights away."""
    torch.manual_seed(0)
    model, forward_loss = GradientInForward(block=lambda: Checkpointed(16), scaled=False), token_loss(2)
    losses, expected = torch_step(model, forward_loss, 2)
    own, gradients = Harness(model, residency=RESIDENT).step(forward_loss, 2, schedule="horizontal")
    assert own == losses
    require_close(gradients, expected, 1e-6)


class CheckpointAround(TinyModel):
    """Checkpoints each block from outside, as transformers does."""

    use_reentrant = False

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.loss(x, targets)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_a_unit_is_an_error(use_reentrant):
    """Units are run again anyway: gradient checkpointing around them is refused with a sentence, never run wrongly."""
    torch.manual_seed(0)
    model = CheckpointAround()
    model.use_reentrant = use_reentrant
    with pytest.raises(ModelError, match="gradient checkpointing"):
        Harness(model).step(token_loss(2), 2)


class Skips(TinyModel):
    """Connections around one unit, around two, and from the first to the last."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        a = self.blocks[0](x)
        b = self.blocks[1](x + a)
        c = self.blocks[2](torch.cat([a, b], dim=-1)[..., 8:24]) + x
        return self.loss(c * self.scale + a, targets)


def test_connections_around_units():
    """Skips outside units are ordinary autograd."""
    torch.manual_seed(0)
    same_in_every_way(Skips(), token_loss(3), 3, against_torch=1e-5)


class Penalised(nn.Module):
    """Asks for a gradient in forward: a gradient penalty."""

    def __init__(self, create_graph):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 1)])
        self.create_graph = create_graph

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        energy = self.blocks[1](torch.tanh(self.blocks[0](x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return energy + force.square().sum()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_gradients_asked_for_in_forward(create_graph, schedule):
    """A unit that runs again cannot give them without booking the weights' too, so that is an error and not a wrong sum."""
    torch.manual_seed(0)
    xs = torch.randn(2, 3, 16)
    with pytest.raises(ModelError, match="while the forward pass was still running"):
        Harness(Penalised(create_graph)).step(lambda model, k: model(xs[k]), 2, schedule=schedule)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_gradients_asked_for_in_forward_where_weights_stay(schedule):
    """Under ordinary autograd second derivatives are torch's."""
    torch.manual_seed(0)
    xs = torch.randn(2, 3, 16)
    model = Penalised(True)
    _, expected = torch_step(model, lambda module, k: module(xs[k]), 2)
    _, gradients = Harness(model, residency=KEPT).step(lambda module, k: module(xs[k]), 2, schedule=schedule)
    require_close(gradients, expected, 1e-5)
