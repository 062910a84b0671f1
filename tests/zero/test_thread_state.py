"""State of the thread that micro-batches share: each has its own, or does not yield, and that is counted."""

import contextvars

import pytest
import torch
from harness import ABSENT, KEPT, Block, Harness, TinyModel, require_same, same_in_every_way, token_loss
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class FunctionMode(TorchFunctionMode):
    """Passes everything on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Passes everything on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "device": lambda: torch.device("cpu"),
}


class Moded(TinyModel):
    """Opens a mode around its middle block."""

    mode = None

    def forward(self, tokens, targets):
        x = self.blocks[0](self.embed(tokens))
        if self.mode is None:
            x = self.blocks[1](x)
        else:
            with MODES[self.mode]():
                x = self.blocks[1](x)
        return self.loss(self.blocks[2](x), targets)


@pytest.mark.parametrize("residency", [ABSENT, KEPT])
@pytest.mark.parametrize("mode", MODES)
def test_modes_that_cannot_be_exchanged(mode, residency):
    """Such a micro-batch goes through the unit without waiting for the others; it is counted and changes no result."""
    torch.manual_seed(0)
    plain = Harness(Moded(), residency=residency)
    torch.manual_seed(0)
    harness = Harness(Moded(), residency=residency)
    harness.model.mode = mode
    for _ in range(2):
        expected_losses, expected = plain.step(token_loss(3), 3)
        losses, gradients = harness.step(token_loss(3), 3)
        assert losses == expected_losses
        require_same(gradients, expected)
    assert harness.recorder.counters()["arrivals_without_yield"] == 6
    assert "arrivals_without_yield" not in plain.recorder.counters()


def test_modes_around_the_whole_step_are_no_hindrance():
    """What was open before the step is the same for all micro-batches, so that they yield as usual."""
    torch.manual_seed(0)
    harness = Harness(TinyModel())
    harness.step(token_loss(3), 3)
    harness.weights.acquired.clear()
    with MODES["saved tensor hooks"](), FunctionMode():
        harness.step(token_loss(3), 3)
    assert "arrivals_without_yield" not in harness.recorder.counters()
    assert len(harness.visits()) == 9


def test_hooks_that_take_the_place_of_others_are_seen():
    """Other saved-tensor hooks than those at the start are another mode, also where there were some at the start."""
    torch.manual_seed(0)
    harness = Harness(Moded())
    harness.model.mode = "saved tensor hooks"
    with MODES["saved tensor hooks"]():
        harness.step(token_loss(3), 3)
    assert harness.recorder.counters()["arrivals_without_yield"] == 3


class Half(TinyModel):
    """Runs its first block without gradients, in some micro-batches under inference mode."""

    inference = False

    def forward(self, tokens, targets):
        with torch.no_grad():
            x = self.blocks[0](self.embed(tokens)) * self.scale
        if self.inference:
            with torch.inference_mode():
                mask = (self.blocks[0](self.embed(tokens)) > 0).float().mean()
            x = x + mask.item()
        x = self.embed(tokens) + x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)


@pytest.mark.parametrize("inference", [False, True])
def test_sections_without_gradients(inference):
    """no_grad and inference mode in one micro-batch do not reach the next one, nor what comes after the section."""
    torch.manual_seed(0)
    model = Half()
    model.inference = inference
    same_in_every_way(model, token_loss(3), 3, against_torch=1e-5)


def test_grad_mode_is_each_micro_batchs_own():
    """A micro-batch that yields inside no_grad finds no_grad again, and the others do not find it."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))

        def forward(self, x, k):
            with torch.set_grad_enabled(k != 1):
                y = self.blocks[0](x)
                seen.append((k, torch.is_grad_enabled()))
                y = self.blocks[1](y)
                seen.append((k, torch.is_grad_enabled()))
            seen.append((k, torch.is_grad_enabled()))
            return self.blocks[2](y).square().mean()

    harness = Harness(Model())
    harness.step(lambda model, k: model(torch.ones(2, 16), k), 3)
    harness.step(lambda model, k: model(torch.ones(2, 16), k), 3)
    assert {(k, enabled) for k, enabled in seen if k != 1} == {(0, True), (2, True)}
    assert [enabled for k, enabled in seen if k == 1] == [False, False, True] * 2
    assert torch.is_grad_enabled()


TENANT = contextvars.ContextVar("tenant", default="nobody")


def test_context_variables():
    """A micro-batch sees the caller's context variables, and its own changes are its own."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(2))

        def forward(self, x, k):
            seen.append(TENANT.get())
            TENANT.set(f"micro-batch {k}")
            x = self.blocks[1](self.blocks[0](x))
            seen.append(TENANT.get() == f"micro-batch {k}")
            return x.square().mean()

    harness = Harness(Model())
    harness.order.learn_with_tail([], None)
    token = TENANT.set("caller")
    harness.step(lambda model, k: model(torch.ones(2, 16), k), 3)
    assert TENANT.get() == "caller"
    TENANT.reset(token)
    assert seen == ["caller"] * 3 + [True] * 3
