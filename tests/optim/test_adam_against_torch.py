"""One update from equal state agrees with torch.optim within 4 units in the last place of the larger of old and new."""

from __future__ import annotations

import pytest
import torch

from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel import AdamArrays, MasterFormat, open_kernel
from infinity.optim.reference import join_master, split_master

STEPS = (1, 2, 10, 100, 1000)
NUMEL = 40_001


def ulps(got: torch.Tensor, expected: torch.Tensor, old: torch.Tensor) -> float:
    """The largest difference, in units in the last place of max(|old|, |new|)."""
    larger = torch.maximum(old.abs(), expected.abs())
    unit = torch.nextafter(larger, torch.tensor(float("inf"))) - larger
    return float(((got.double() - expected.double()).abs() / unit.double()).max())


def optimizer_at(
    step: int, weights: torch.Tensor, hyper: AdamHyper
) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A torch optimizer over a copy of `weights` that has made `step` - 1 updates, and its state."""
    parameter = torch.nn.Parameter(weights.clone())
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    optimizer = kind(
        [parameter], lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, weight_decay=hyper.weight_decay,
        foreach=False, fused=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(step)
    state = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": torch.randn(NUMEL, generator=generator) * 0.1 if step > 1 else torch.zeros(NUMEL),
        "exp_avg_sq": torch.rand(NUMEL, generator=generator) * 0.05 if step > 1 else torch.zeros(NUMEL),
    }
    optimizer.state[parameter] = state
    return optimizer, state


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("master", [MasterFormat.FP32, MasterFormat.SPLIT_BF16])
def test_adamw_update_is_within_four_ulp_of_torch(step: int, grad_dtype: str, master: MasterFormat) -> None:
    """Weights and both moments, with and without weight decay and for a beta1 below a half (C55)."""
    generator = torch.Generator().manual_seed(100 + step)
    weights = torch.randn(NUMEL, generator=generator)
    grad = torch.randn(NUMEL, generator=generator).to(getattr(torch, grad_dtype))
    kernel = open_kernel(num_threads=2)
    for beta1, weight_decay in ((0.9, 0.1), (0.9, 0.0), (0.4, 0.01)):
        hyper = AdamHyper(1e-3, beta1, 0.999, 1e-8, weight_decay, step, decoupled=True)
        optimizer, state = optimizer_at(step, weights, hyper)
        old = {name: tensor.clone() for name, tensor in state.items()}
        moments = old["exp_avg"].clone(), old["exp_avg_sq"].clone()
        high, low = split_master(weights) if master is MasterFormat.SPLIT_BF16 else (weights.clone(), torch.empty(0))
        arrays = AdamArrays(high.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), grad.data_ptr(), low.data_ptr())
        kernel.adam_update(master, grad_dtype, NUMEL, arrays, hyper)
        got = join_master(high, low) if master is MasterFormat.SPLIT_BF16 else high

        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = grad.float()
        optimizer.step()
        assert ulps(moments[0], state["exp_avg"], old["exp_avg"]) <= 4
        assert ulps(moments[1], state["exp_avg_sq"], old["exp_avg_sq"]) <= 4
        assert ulps(got, parameter.detach(), weights) <= 4


def test_coupled_decay_is_adam() -> None:
    """Without decoupling, weight decay goes into the gradient as in torch.optim.Adam, and that is not AdamW (C55)."""
    weights, grad = torch.linspace(0.5, 1.5, NUMEL), torch.linspace(0.1, 1.0, NUMEL)
    hyper = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.3, 5, decoupled=False)
    optimizer, state = optimizer_at(5, weights, hyper)
    got, moments = weights.clone(), (state["exp_avg"].clone(), state["exp_avg_sq"].clone())
    arrays = AdamArrays(got.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), grad.data_ptr())
    open_kernel().adam_update(MasterFormat.FP32, "float32", NUMEL, arrays, hyper)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = grad.clone()
    optimizer.step()
    assert ulps(got, parameter.detach(), weights) <= 4
    assert (got - weights * (1 - 1e-2 * 0.3)).abs().max() > 1e-4
