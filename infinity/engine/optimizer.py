"""What the user sees of the optimizer and the learning-rate schedule: hyper-parameters that a step snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, IllegalTransition, ModelError
from infinity.optim.hyper import GroupHyper
from infinity.zero.access import states_of


class Optimizer(torch.optim.Optimizer):
    """What `initialize` returns as the optimizer, over all trainable parameters: one of torch's to whoever looks at it.

    `param_groups` may be changed between steps, as in torch.optim, and any scheduler of torch may move them; where the
    engine has a schedule of its own, every step sets `lr` from that, and `betas` where it cycles momentum. The state lives
    in its tiers, not in `state`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any], *, decoupled: bool | None) -> None:
        super().__init__(list(groups), dict(defaults))
        self.decoupled = decoupled  # whether it is AdamW or Adam here; None where an optimizer of torch makes the updates
        self.steps: dict[str, int] = {}  # updates made, by parameter name
        self.num_groups = len(self.param_groups)  # as initialize was given them
        self._take_step: Callable[[], None] = _has_no_engine
        self._at_start: list[dict[str, object]] = []
        self._discard_step: Callable[[], None] = _has_no_engine

    def serve(self, take_step: Callable[[], None], discard_step: Callable[[], None]) -> None:
        """Let `step` and `zero_grad` be the engine's (called once, by what composes it)."""
        self._take_step, self._discard_step = take_step, discard_step
        self._at_start = [_numbers(group) for group in self.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The same as `engine.step()`. Raises ConfigError for a closure."""
        if closure is not None:
            raise ConfigError("optimizer.step got a closure.", remedy="Call backward first, and step without one.")
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The same as `engine.zero_grad()`: after `step` there is nothing to discard."""
        self._discard_step()

    def numbers(self) -> dict[str, object]:
        """Return what an update depends on, by a name that a user finds again: it has to be the same on every rank."""
        found: dict[str, object] = {"whether it is AdamW": self.decoupled}
        for index, group in enumerate(self.param_groups):
            found |= {f"optimizer.param_groups[{index}][{key!r}]": number for key, number in _numbers(group).items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as torch's optimizers do, gathered from the tiers, for models that fit in memory.

        The fp32 masters are in `engine.state_dict()`. Over several ranks every rank calls it.
        """
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        groups = [
            {**group, "params": [numbers[id(parameter)] for parameter in group["params"]]} for group in self.param_groups
        ]
        state = {}
        for number, parameter in enumerate(self._parameters()):
            own = states_of(parameter)
            kept = own.optimizer_state()
            if self.decoupled is not None:
                count = self.steps.get(own.name)
                kept = {"step": torch.tensor(float(count)), **kept} if count else {}
            if kept:
                state[number] = kept
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned. Raises ModelError for other groups and states of another optimizer."""
        groups, parameters = state_dict["param_groups"], self._parameters()
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes:
            raise ModelError(
                f"load_state_dict got groups of {[len(group['params']) for group in groups]} parameters, not {sizes}.",
                remedy="Load the state of an optimizer over the same groups.",
            )
        for number, parameter in enumerate(parameters):
            own, kept = states_of(parameter), dict(state_dict["state"].get(number, {}))
            if self.decoupled is not None:
                count = int(kept.pop("step", 0))
                self.steps.pop(own.name, None)
                self.steps.update({own.name: count} if count else {})
            own.replace_optimizer_state(kept)
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})

    def moved(self) -> list[dict[str, object]]:
        """Return, by group, the numbers that are no longer those of `initialize`: what a checkpoint keeps of the groups."""
        return [
            {key: value for key, value in _numbers(group).items() if value != start.get(key)}
            for group, start in zip(self.param_groups, self._at_start, strict=False)
        ]

    def move(self, moved: Sequence[Mapping[str, object]]) -> None:
        """Write what `moved` returned into the groups; nothing where there were other groups."""
        if len(moved) == len(self.param_groups):
            for group, numbers in zip(self.param_groups, moved, strict=True):
                group.update({key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()})

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def stepped(self) -> None:
        """An update was made: schedulers of torch over these groups warn where they moved before one was."""
        self._opt_called = True

    def require_groups(self) -> None:
        """Raise ConfigError where a group was added or taken away."""
        if len(self.param_groups) != self.num_groups:
            raise ConfigError(
                f"optimizer.param_groups has {len(self.param_groups)} groups; initialize was given {self.num_groups}.",
                remedy="Give all of them to infinity.initialize(model_parameters=...).",
            )

    def hyper(self) -> tuple[GroupHyper, ...]:
        """Return a snapshot of every group's hyper-parameters, of Adam. Raises ConfigError for what is none."""
        return tuple(_group_hyper(group, bool(self.decoupled)) for group in self.param_groups)


def _has_no_engine() -> None:
    raise IllegalTransition("The optimizer has no engine.")


def _numbers(group: Mapping[str, Any]) -> dict[str, object]:
    """Return the numbers of a group, and its lists of numbers, as JSON has them."""
    found: dict[str, object] = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
        numbers = list(plain) if isinstance(plain, tuple | list) else [plain]
        if numbers and all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            found[key] = numbers if isinstance(plain, tuple | list) else plain
    return found


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
