"""Unmodified models of transformers train in vertical order with the gradients of ordinary accumulation."""

import copy

import pytest
import torch
from harness import ABSENT, KEPT, Harness, require_close, require_same, torch_step
from transformers_cases import MODELS, VOCAB, build_model, language_loss


@pytest.mark.parametrize("mask", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_ordinary_accumulation(name, mask):
    """Bit for bit where each parameter is used once per micro-batch, to rounding where it is used more often."""
    model, forward_loss = build_model(name), language_loss(3, mask)
    losses, expected = torch_step(copy.deepcopy(model), forward_loss, 3)
    harness = Harness(model, residency=ABSENT)
    for _ in range(2):
        own, gradients = harness.step(forward_loss, 3)
        assert own == losses
        if MODELS[name][2]:
            require_same(gradients, expected)
        else:
            require_close(gradients, expected, 1e-5)
    assert not harness.recorder.counters()["tails_not_separable"]
    assert "arrivals_without_yield" not in harness.recorder.counters()


@pytest.mark.parametrize("name", MODELS)
def test_schedule_and_residency_change_no_bit(name):
    """Vertical and horizontal order, absent and kept weights: the same bits."""
    forward_loss = language_loss(3)
    expected = Harness(build_model(name), residency=ABSENT).step(forward_loss, 3)
    for residency in (ABSENT, KEPT):
        for schedule in ("vertical", "horizontal"):
            losses, gradients = Harness(build_model(name), residency=residency).step(forward_loss, 3, schedule=schedule)
            assert losses == expected[0]
            require_same(gradients, expected[1], where=(residency, schedule))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_units_are_asked_for_twice_whatever_the_number_of_micro_batches(name):
    """Each visit of a unit is served once in forward and once in backward."""
    harness = Harness(build_model(name), residency=ABSENT)
    counts = []
    for num in (1, 4):
        harness.step(language_loss(num), num)
        harness.weights.acquired.clear()
        harness.step(language_loss(num), num)
        counts.append(len(harness.visits()))
    num_visits = len([unit for unit in harness.units if unit.groups])
    assert counts[0] == counts[1]
    assert counts[1] <= 2 * (num_visits + 1)


def test_hidden_states_can_be_asked_for():
    """What transformers collects from its layers on request is each micro-batch's own."""
    forward_loss = language_loss(3)

    def with_hidden(model, k):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(2, VOCAB, (3, 2, 12), generator=generator)
        output = model(input_ids=tokens[k], labels=tokens[k], output_hidden_states=True)
        return output.loss + 0.01 * sum(hidden.square().mean() for hidden in output.hidden_states)

    model = build_model("llama")
    losses, expected = torch_step(copy.deepcopy(model), with_hidden, 3)
    own, gradients = Harness(model).step(with_hidden, 3)
    torch.testing.assert_close(own, losses)
    require_close(gradients, expected, 1e-5)
    assert own != Harness(build_model("llama")).step(forward_loss, 3)[0]
