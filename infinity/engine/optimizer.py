"""What the user sees of the optimizer and the learning-rate schedule: hyper-parameters that a step snapshots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from infinity.config.optimizer import OptimizerSection
from infinity.errors import ConfigError
from infinity.optim.hyper import GroupHyper


@dataclass(slots=True)
class Optimizer:
    """Adam or AdamW over all trainable parameters. `param_groups` may be changed between steps, as in torch.optim.

    But for `lr`, which every step sets from the schedule, and for `betas` where it cycles momentum. The update itself is
    `engine.step()`.
    """

    param_groups: list[dict[str, object]]
    decoupled: bool
    steps: dict[str, int] = field(default_factory=dict)  # updates made, by parameter name

    def hyper(self) -> tuple[GroupHyper, ...]:
        """Return a snapshot of every group's hyper-parameters. Raises ConfigError for what is none."""
        return tuple(_group_hyper(group, self.decoupled) for group in self.param_groups)


def build_optimizer(section: OptimizerSection) -> Optimizer:
    """Return the optimizer that the configuration describes, with one group."""
    params = section.params
    group: dict[str, object] = {
        "lr": params.lr,
        "betas": tuple(params.betas),
        "eps": params.eps,
        "weight_decay": params.weight_decay,
    }
    return Optimizer([group], section.decoupled)


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
