"""The order of work changes no bit: vertical = horizontal = weights that stay = plain torch."""

import copy

import pytest
import torch
from harness import ABSENT, KEPT, Harness, TinyModel, require_same, same_in_every_way, token_loss, torch_step


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5])
def test_fp32_gradients_do_not_depend_on_schedule_or_residency(num_micro_batches):
    """Losses and gradients are those of plain torch to the bit, in every schedule and residency."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(), token_loss(num_micro_batches), num_micro_batches, against_torch=1e-5)


@pytest.mark.parametrize("num_micro_batches", [3, 5])
def test_parameters_used_once_have_the_bits_of_torch(num_micro_batches):
    """Where every parameter is used once per micro-batch nothing is left to rounding."""
    torch.manual_seed(0)
    model = TinyModel(scaled=False)
    same_in_every_way(model, token_loss(num_micro_batches), num_micro_batches, against_torch="bits")


@pytest.mark.parametrize("num_micro_batches", [1, 3, 5])
def test_bf16_gradients_are_summed_in_fp32(num_micro_batches):
    """bf16 gradients of micro-batches are added in fp32, in ascending order, whatever the schedule."""
    torch.manual_seed(0)
    model = TinyModel(scaled=False)
    same_in_every_way(model.bfloat16(), token_loss(num_micro_batches), num_micro_batches, against_torch="bits")


def test_sums_ascend_over_micro_batches():
    """With gradients whose sum depends on the order, the result is that of the ascending order."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model[0].weight)
    torch.nn.init.ones_(model[1].weight)
    xs = [torch.tensor([[value]]) for value in (1e8, 1.0, -1e8, 1.0)]

    def forward_loss(module, k):
        return module(xs[k]).sum()

    for residency in (ABSENT, KEPT):
        for schedule in ("vertical", "horizontal"):
            harness = Harness(copy.deepcopy(model), residency=residency)
            _, gradients = harness.step(forward_loss, 4, schedule=schedule, coefficients=[1.0] * 4)
            assert {name: float(value) for name, value in gradients.items()} == {"0.weight": 1.0, "1.weight": 1.0}


def test_backward_visits_each_unit_once():
    """One step asks for each unit once per direction, the last one once, for any number of micro-batches."""
    torch.manual_seed(0)
    harness = Harness(TinyModel())
    forward_loss = token_loss(5)
    harness.step(forward_loss, 5)
    harness.weights.acquired.clear()
    harness.step(forward_loss, 5)
    there = ["embed", "blocks.0", "blocks.1", "blocks.2"]
    assert harness.visits() == [*there, "head", *reversed(there)]


def test_weights_of_micro_batches_scale_their_gradients():
    """Coefficients in proportion to token counts give the gradient of the mean over tokens."""
    torch.manual_seed(0)
    model, forward_loss = TinyModel(), token_loss(3)
    weights = [0.5, 0.2, 0.3]
    expected = {}
    for k, weight in enumerate(weights):
        model.zero_grad()
        (forward_loss(model, k) * weight).backward()
        for name, parameter in model.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.clone()
    model.zero_grad()
    _, gradients = Harness(model).step(forward_loss, 3, coefficients=weights)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-7)


def test_micro_batches_may_differ_in_shape():
    """Sequences of other lengths and batches of other sizes go through the same step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 8), (1, 3), (4, 5)]
    batches = [(torch.randint(37, s, generator=generator), torch.randint(37, s, generator=generator)) for s in shapes]
    same_in_every_way(TinyModel(), lambda model, k: model(*batches[k]), 3, against_torch=1e-5)


def test_a_second_step_sees_new_weights():
    """What a step does depends on the weights of its time only: after a change it equals torch again."""
    torch.manual_seed(0)
    model, forward_loss = TinyModel(tied=True), token_loss(2)
    harness = Harness(model)
    harness.step(forward_loss, 2)
    with torch.no_grad():
        for values in harness.weights.values.values():
            for value in values.values():
                value.mul_(0.9)
    _, gradients = harness.step(forward_loss, 2)
    reference = TinyModel(tied=True)
    values = {name: value for shard in harness.weights.values.values() for name, value in shard.items()}
    reference.load_state_dict({**values, "head.weight": values["embed.weight"]})
    _, expected = torch_step(reference, forward_loss, 2)
    assert gradients.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-5, atol=1e-8)
    again = Harness(reference)
    require_same(again.step(forward_loss, 2)[1], gradients)
