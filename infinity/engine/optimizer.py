"""What the user sees of the optimizer and the learning-rate schedule: hyper-parameters that a step snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infinity.errors import ConfigError, IllegalTransition
from infinity.optim.hyper import GroupHyper


@dataclass(slots=True)
class Optimizer:
    """Adam or AdamW over all trainable parameters. `param_groups` may be changed between steps, as in torch.optim.

    But for `lr`, which every step sets from the schedule, and for `betas` where it cycles momentum.
    """

    param_groups: list[dict[str, Any]]
    decoupled: bool
    steps: dict[str, int] = field(default_factory=dict)  # updates made, by parameter name
    num_groups: int = field(init=False)  # as initialize was given them
    _take_step: Callable[[], None] = field(default_factory=lambda: _has_no_engine)
    _discard_step: Callable[[], None] = field(default_factory=lambda: _has_no_engine)

    def __post_init__(self) -> None:
        self.num_groups = len(self.param_groups)

    def serve(self, take_step: Callable[[], None], discard_step: Callable[[], None]) -> None:
        """Let `step` and `zero_grad` be the engine's (called once, by what composes it)."""
        self._take_step, self._discard_step = take_step, discard_step

    def step(self) -> None:
        """The same as `engine.step()`."""
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The same as `engine.zero_grad()`: after `step` there is nothing to discard."""
        self._discard_step()

    def require_groups(self) -> None:
        """Raise ConfigError where a group was added or taken away."""
        if len(self.param_groups) != self.num_groups:
            raise ConfigError(
                f"optimizer.param_groups has {len(self.param_groups)} groups; initialize was given {self.num_groups}.",
                remedy="Give all of them to infinity.initialize(model_parameters=...).",
            )

    def hyper(self) -> tuple[GroupHyper, ...]:
        """Return a snapshot of every group's hyper-parameters. Raises ConfigError for what is none."""
        return tuple(_group_hyper(group, self.decoupled) for group in self.param_groups)


def _has_no_engine() -> None:
    raise IllegalTransition("The optimizer has no engine.")


def _group_hyper(group: Mapping[str, object], decoupled: bool) -> GroupHyper:
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise _wrong("betas", betas, "a pair of numbers")
    return GroupHyper(
        lr=_number(group, "lr"),
        beta1=_beta(betas[0]),
        beta2=_beta(betas[1]),
        eps=_number(group, "eps"),
        weight_decay=_number(group, "weight_decay"),
        decoupled=decoupled,
    )


def _number(group: Mapping[str, object], name: str) -> float:
    value = group.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, value, "a number")
    return float(value)


def _beta(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise _wrong("betas", value, "a number from 0 to below 1")
    return float(value)


def _wrong(name: str, value: object, needed: str) -> ConfigError:
    return ConfigError(f"optimizer.param_groups: {name} is {value!r}, not {needed}.", remedy="Set it before the next step.")
