"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2) as an optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from infinity.errors import ConfigError


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradient and momentum; weight decay acts on the weight. One state: "exp_avg"."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        """Raises ConfigError for a negative lr or decay, and for betas outside [0, 1)."""
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"Lion got lr {lr}, betas {betas} and weight_decay {weight_decay}.",
                remedy="lr and weight_decay are at least 0, betas from 0 to below 1.",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                exp_avg: torch.Tensor = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, exp_avg, beta1).sign_(), alpha=-lr)
                exp_avg.lerp_(parameter.grad, 1 - beta2)
        return loss
