"""What a parameter is while its weights are away: readable attributes, and an error for every operation."""

import copy
import io
import pickle

import pytest
import torch
from harness import ABSENT, KEPT, RESIDENT, Harness, TinyModel, token_loss
from torch import nn

from infinity.errors import AbsentParameterError, ModelError
from infinity.zero.absent import AbsentParameter


@pytest.fixture
def weight():
    """Return an absent weight of shape [4, 3]."""
    return AbsentParameter.standing_for("blocks.0.weight", "blocks.0", (4, 3), torch.bfloat16, torch.device("cpu"), True)


def test_attributes_can_be_read(weight):
    """Shape, dtype, device and the like are those of the parameter."""
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.ndim, weight.dim(), weight.numel(), len(weight)) == ((4, 3), 2, 2, 12, 4)
    assert weight.size(0) == 4
    assert weight.stride() == (3, 1)
    assert weight.is_contiguous()
    assert (weight.dtype, weight.device, weight.layout) == (torch.bfloat16, torch.device("cpu"), torch.strided)
    assert (weight.requires_grad, weight.is_leaf, weight.grad, weight.grad_fn) == (True, True, None, None)
    assert (weight.element_size(), weight.nbytes, weight.itemsize) == (2, 24, 2)
    assert weight.is_floating_point()
    assert torch.is_floating_point(weight)
    assert not any((weight.is_complex(), weight.is_cuda, weight.is_meta, weight.is_sparse))
    assert weight in {weight}
    assert "blocks.0.weight" in repr(weight)


def _assign_data(weight):
    weight.data = torch.zeros(4, 3)


OPERATIONS = {
    "linear": lambda w: nn.functional.linear(torch.ones(2, 3, dtype=torch.bfloat16), w),
    "embedding": lambda w: nn.functional.embedding(torch.zeros(2, dtype=torch.long), w),
    "matmul": lambda w: torch.ones(2, 4, dtype=torch.bfloat16) @ w,
    "sum": lambda w: w.sum(),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "data": lambda w: w.data,
    "assign data": _assign_data,
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "cat": lambda w: torch.cat([torch.zeros(1, 3), w]),
    "stack": lambda w: torch.stack((w, w)),
    "to": lambda w: w.to(torch.float32),
    "cpu": lambda w: w.cpu(),
    "float": lambda w: w.float(),
    "view": lambda w: w.view(-1),
    "transpose": lambda w: w.T,
    "index": lambda w: w[0],
    "set item": lambda w: w.__setitem__(0, 1.0),
    "item": lambda w: w.item(),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "iter": lambda w: list(w),
    "bool": bool,
    "equal": lambda w: torch.equal(w, w),
    "compare": lambda w: w == 0,
    "zero_": lambda w: w.zero_(),
    "normal_": lambda w: nn.init.normal_(w),
    "xavier": lambda w: nn.init.xavier_uniform_(w),
    "copy_": lambda w: w.copy_(torch.zeros(4, 3)),
    "copy from": lambda w: torch.zeros(4, 3).copy_(w),
    "no_grad add_": lambda w: torch.no_grad()(lambda: w.add_(1))(),
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
    "backward": lambda w: w.backward(),
    "hook": lambda w: w.register_hook(lambda g: g),
    "requires_grad_": lambda w: w.requires_grad_(False),
    "grad": lambda w: torch.autograd.grad(torch.ones((), requires_grad=True) * 1, w),
    "where": lambda w: torch.where(torch.ones(4, 3, dtype=torch.bool), w, 0.0),
    "einsum": lambda w: torch.einsum("ij->ji", w),
    "keyword": lambda w: nn.functional.linear(torch.ones(2, 3), weight=w),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_an_error(weight, operation):
    """The error names parameter and unit and says what to do."""
    with pytest.raises(AbsentParameterError) as caught:
        OPERATIONS[operation](weight)
    assert "blocks.0.weight" in caught.value.message
    assert "'blocks.0'" in caught.value.message
    assert "infinity.units" in caught.value.remedy


def test_modules_with_absent_parameters():
    """Moving, copying, saving and converting such a module fail loudly; looking at it does not."""
    harness = Harness(TinyModel())
    model = harness.model
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert "Embedding(37, 16)" in repr(model)
    model.zero_grad()
    model.train().eval()
    torch.optim.AdamW(model.parameters())
    for use in (lambda: model.state_dict(), lambda: copy.deepcopy(model), lambda: model.half(), lambda: model.to("meta")):
        with pytest.raises(AbsentParameterError):
            use()


class FunctionalHead(TinyModel):
    """Uses the embedding's weight as the head without calling the embedding."""

    def loss(self, x, targets):
        logits = nn.functional.linear(self.norm(x), self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Penalty(TinyModel):
    """Adds an L2 penalty over all of its parameters to the loss."""

    def loss(self, x, targets):
        return super().loss(x, targets) + sum(parameter.square().sum() for parameter in self.parameters())


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("kind", [FunctionalHead, Penalty])
@pytest.mark.parametrize("residency", [ABSENT, KEPT, RESIDENT])
def test_a_parameter_used_outside_its_unit(kind, residency, schedule):
    """An absent one is an error at once; a resident one is an error when its gradient comes, instead of being lost."""
    torch.manual_seed(0)
    harness = Harness(kind(), residency=residency)
    expected = ModelError if residency is RESIDENT else AbsentParameterError
    with pytest.raises(expected, match=r"Parameter \S+\.weight was used") as caught:
        harness.step(token_loss(2), 2, schedule=schedule)
    assert "infinity.units" in caught.value.remedy


def test_the_remedy_works():
    """Named so that its module is no unit, the parameter joins the root group and may be used anywhere."""
    from harness import same_in_every_way

    torch.manual_seed(0)
    same_in_every_way(FunctionalHead(), token_loss(3), 3, against_torch=1e-5, patterns=["Block"])


def test_parameters_are_away_again_after_the_step():
    """Between steps, and after an evaluation, the modules of units hold absent parameters again."""
    torch.manual_seed(0)
    harness = Harness(TinyModel())
    harness.step(token_loss(2), 2)
    with torch.no_grad():
        harness.model.eval()
        loss = token_loss(2)(harness.model, 0)
    assert torch.isfinite(loss)
    for name, parameter in harness.model.named_parameters():
        assert isinstance(parameter, AbsentParameter) == (name.split(".")[0] in ("embed", "blocks", "head")), name


def test_training_outside_the_engine_is_an_error():
    """A call for training that no schedule knows of would lose its gradient, so it is refused; evaluation is fine."""
    from infinity.errors import IllegalTransition

    harness = Harness(TinyModel())
    with pytest.raises(IllegalTransition, match="outside the engine"):
        token_loss(1)(harness.model, 0)
    harness.model.eval()
    assert not harness.model.blocks[0](torch.randn(2, 16, requires_grad=True)).requires_grad
