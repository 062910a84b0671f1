"""Models that cannot be trained by units exactly are refused before anything is reserved."""

from pathlib import Path

import pytest
import torch

import infinity
from infinity.errors import ModelError


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_on_parameters_are_refused(tmp_path: Path, register: str) -> None:
    """Gradients are those of leaves that stand for the parameters, so a hook would never be called: that is said."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    getattr(model[1].weight, register)(lambda tensor: None)
    with pytest.raises(ModelError, match=r"Parameter 1\.weight has a gradient hook"):
        infinity.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    assert torch.isfinite(model(torch.ones(1, 8))).all()
