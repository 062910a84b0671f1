"""An exception in one micro-batch: everything is as before the step, and the next step works."""

import copy

import greenlet
import pytest
import torch
from harness import ABSENT, KEPT, Block, Harness, TinyModel, require_same, token_loss
from torch import nn


class Trouble(Exception):
    """What the tests raise."""


class Fails(TinyModel):
    """Raises at a place in forward of one micro-batch, inside autocast and no_grad; counts what is cleaned up."""

    place = None

    def __init__(self, **options):
        super().__init__(**options)
        self.cleaned = []

    def forward(self, tokens, targets, k):
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                x = self.embed(tokens)
            x = self.embed(tokens)
            for number, block in enumerate(self.blocks):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = block(x).float()
                if self.place == ("between", number, k):
                    raise Trouble
            return self.loss(x, targets)
        finally:
            self.cleaned.append(k)

    def loss(self, x, targets):
        if self.place == ("tail",):
            raise Trouble
        return super().loss(x, targets)


class FailsInside(Block):
    """Raises inside a unit when told to, in the first run or in the rerun."""

    calls, fails_at = 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at:
            raise Trouble
        return super().forward(x)


def _fails_loss(num):
    inner = token_loss(num)
    batches = inner.__closure__[0].cell_contents
    return lambda model, k: model(*batches[k], k)


def _state(harness):
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "random": torch.get_rng_state().tolist(),
        "parameters": [id(parameter) for module in harness.model.modules() for parameter in module._parameters.values()],
        "held": {shard for shard, count in harness.weights.held.items() if count},
        "pending": [state.num_pending_calls for state in harness.sums._states],
        "sums": [bool(state.sums) for state in harness.sums._states],
        "micro_batch": harness.walk.micro_batch,
    }


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("place", [("between", 0, 2), ("between", 1, 1), ("between", 2, 0), ("tail",)])
@pytest.mark.parametrize("residency", [ABSENT, KEPT])
def test_everything_is_as_before_the_step(place, known, residency):
    """Greenlets are closed, their cleanup has run, and no state of torch, the model or the sums is left changed."""
    torch.manual_seed(0)
    model, forward_loss = Fails(), _fails_loss(3)
    fresh = Harness(copy.deepcopy(model), residency=residency)
    harness = Harness(model, residency=residency)
    if known:
        harness.step(forward_loss, 3)
        fresh.step(forward_loss, 3)
    model.cleaned.clear()
    before = _state(harness)
    model.place = place
    with pytest.raises(Trouble):
        harness.step(forward_loss, 3)
    assert _state(harness) == before
    assert set(model.cleaned) >= ({0, 1, 2} if known else set())
    model.place = None
    harness.randomness.step = fresh.randomness.step
    losses, gradients = harness.step(forward_loss, 3)
    expected_losses, expected = fresh.step(forward_loss, 3)
    assert losses == expected_losses
    require_same(gradients, expected)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("fails_at", [1, 4, 8, 12])
def test_exceptions_inside_units(fails_at, schedule):
    """The same holds for an exception inside a unit, in its first run and in its rerun in backward."""
    torch.manual_seed(0)
    model = TinyModel(num_blocks=1, block=lambda: FailsInside(16))
    forward_loss = token_loss(6)
    fresh = Harness(copy.deepcopy(model))
    harness = Harness(model)
    before = _state(harness)
    model.blocks[0].fails_at = fails_at
    with pytest.raises(Trouble):
        harness.step(forward_loss, 6, schedule=schedule)
    assert _state(harness) == before
    model.blocks[0].fails_at = None
    harness.randomness.step = 0
    losses, gradients = harness.step(forward_loss, 6, schedule=schedule)
    expected_losses, expected = fresh.step(forward_loss, 6, schedule=schedule)
    assert losses == expected_losses
    require_same(gradients, expected)


class RefusesToEnd(TinyModel):
    """Catches whatever comes at its second block, and raises on its own at the end."""

    def forward(self, tokens, targets, k):
        x = self.blocks[0](self.embed(tokens))
        if k == 0:
            raise Trouble
        try:
            x = self.blocks[1](x)
        except greenlet.GreenletExit:
            x = self.blocks[2](x)
            raise KeyError("cleanup failed") from None
        return self.loss(x, targets)


def test_a_cleanup_that_fails_does_not_keep_others_from_theirs():
    """An exception in one micro-batch's cleanup still lets all others be closed and the state be restored."""
    torch.manual_seed(0)
    harness = Harness(RefusesToEnd())
    harness.order.learn_with_tail([], None)
    before = _state(harness)
    with pytest.raises(KeyError, match="cleanup failed"):
        harness.step(_fails_loss(4), 4)
    assert _state(harness) == before
    assert greenlet.getcurrent().parent is None


def test_no_micro_batch_is_left_running():
    """After a failed step no greenlet is suspended in the model's forward."""
    ended = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(2))

        def forward(self, x, k):
            try:
                x = self.blocks[0](x)
                if k == 0:
                    raise Trouble
                return self.blocks[1](x).sum()
            finally:
                ended.append(k)

    harness = Harness(Model())
    harness.order.learn_with_tail([], None)
    with pytest.raises(Trouble):
        harness.step(lambda model, k: model(torch.ones(2, 16), k), 4)
    assert sorted(ended) == [0, 1, 2, 3]
