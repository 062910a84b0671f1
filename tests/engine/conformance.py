"""An engine beside plain torch: what a conformance check trains, on one rank or on one of several.

The checks are functions that can be imported, so that a test calls them here or lets a process call them that plays a rank.
Each rank has its own micro-batches; the plain module sees those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from kit import MicroBatch, compute_dtype, open_engine, settings
from torch import nn

from infinity import utils

STATES = ("exp_avg", "exp_avg_sq")
LR = 1e-3


class Twins:
    """The same module twice: an engine's, and one that torch.optim.AdamW trains. Used as a context manager."""

    def __init__(
        self, build: Callable[[], nn.Module], nvme: str | Path, *, stage: int = 3, num_micro_batches: int = 1,
        clip: float = 0.0, options: Mapping[str, Any] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        config.setdefault("bf16", False)
        self.config = settings(Path(nvme), num_micro_batches=num_micro_batches, clip=clip, lr=LR, **config)
        self.config["zero_optimization"]["stage"] = stage
        self.num_micro_batches = num_micro_batches
        self.plain = build()
        trained = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1, foreach=False)
        self.engine = open_engine(build(), self.config, **(options or {}))

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    @property
    def num_in_step(self) -> int:
        """Micro-batches of a step over all ranks: what the plain module's losses are divided by."""
        return self.num_micro_batches * self.engine.world_size

    def batches(self, draw: Callable[[int, int, torch.dtype], list[MicroBatch]], step: int, num: int | None = None) -> Any:
        """Return (this rank's micro-batches of a step, those of all ranks), `num` a rank."""
        num = num or self.num_micro_batches
        drawn = draw(step, num * self.engine.world_size, compute_dtype(self.config))
        first = self.engine.global_rank * num
        return drawn[first : first + num], drawn

    def step(self) -> None:
        """Take both steps; the engine must be at its boundary."""
        assert self.engine.is_gradient_accumulation_boundary()
        self.engine.optimizer.step()
        assert self.engine.was_step_applied()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the fp32 master of every parameter, on every rank."""
        found = {name: utils.safe_get_full_fp32_param(one) for name, one in self.engine.module.named_parameters()}
        return {name: value for name, value in found.items() if value is not None}

    def make_equal(self) -> None:
        """Give the plain module the engine's masters, so that rounding does not add up."""
        masters = self.masters()
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                parameter.copy_(masters[name])

    def require_same_gradients(self, rtol: float = 1e-4, atol: float = 1e-6) -> None:
        """Every element of every gradient that waits for the step is torch's; where torch has none there is none."""
        for name, parameter in self.plain.named_parameters():
            ours = utils.safe_get_full_grad(self.engine.module.get_parameter(name))
            if parameter.grad is None:
                assert ours is None, name
            else:
                require_close(ours, parameter.grad.float(), name, rtol, atol)

    def require_same_states(self, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """Every element of every master and both its moments is torch's."""
        for name, theirs in self.plain.named_parameters():
            ours = self.engine.module.get_parameter(name)
            require_close(utils.safe_get_full_fp32_param(ours), theirs.detach(), name, rtol, atol)
            for state in STATES:
                value, expected = utils.safe_get_full_optimizer_state(ours, state), self.optimizer.state.get(theirs, {})
                if not theirs.requires_grad:
                    assert value is None, name
                elif state not in expected:  # torch makes no state before the first gradient
                    assert value is not None
                    assert not value.any(), name
                else:
                    require_close(value, expected[state], f"{name} {state}", rtol, atol * 1e-2)


def require_close(ours: torch.Tensor | None, theirs: torch.Tensor, name: str, rtol: float, atol: float) -> None:
    assert ours is not None, name
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda message: f"{name}: {message}")
