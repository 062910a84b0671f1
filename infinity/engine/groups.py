"""Parameter groups: which parameters the optimizer trains with which hyper-parameters, as users say it in torch.

They come from `initialize(model_parameters=...)` (parameters, or groups as torch.optim takes them), or from a torch Adam or
AdamW whose groups are taken over as they are. Without either there is one group with all trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.config.optimizer import OptimizerSection
from infinity.errors import ConfigError

GivenParameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
GivenOptimizer = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]

_HYPER = ("lr", "betas", "eps", "weight_decay")
# Of a torch Adam: switches of its own implementations. What changes the arithmetic must be off.
_ADAM_SWITCHES = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "initial_lr")
_ADAM_REFUSED = ("amsgrad", "maximize")


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a model's trainable parameters; `values` are dicts as torch's, `members` the parameters by identity."""

    values: tuple[dict[str, Any], ...]
    members: Mapping[int, int]  # id of a parameter -> its group
    decoupled: bool
    notes: tuple[str, ...] = ()

    def index_of(self, parameter: nn.Parameter) -> int:
        return self.members.get(id(parameter), 0)


def groups_of(
    model: nn.Module, section: OptimizerSection, parameters: GivenParameters | None, optimizer: GivenOptimizer | None
) -> Groups:
    """Return the groups that the user asks for.

    Raises ConfigError for an optimizer other than Adam and AdamW, for a trainable parameter in no group, for one that is no
    part of the model, one in two groups, and a group key that means nothing.
    """
    decoupled = section.decoupled
    notes: tuple[str, ...] = ()
    if optimizer is not None:
        listed = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
        taken = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(listed)
        _require_adam(taken)
        decoupled = isinstance(taken, torch.optim.AdamW)
        values: tuple[dict[str, Any], ...] = tuple(taken.param_groups)
        notes = (f"optimizer: the {type(taken).__name__} given to initialize is used, not the configuration's.",)
    else:
        params = section.params
        defaults: dict[str, Any] = {
            "lr": params.lr, "betas": tuple(params.betas), "eps": params.eps, "weight_decay": params.weight_decay,
        }  # fmt: skip
        values = tuple({**defaults, **group} for group in _as_groups(model, parameters))
    return Groups(values, _members(model, values), decoupled, notes)


def put_into_place(groups: Groups, outside: Mapping[int, nn.Parameter], undo: ExitStack) -> None:
    """Let every group hold what the modules now hold in the place of its parameters, which `outside` gives by identity."""
    for group in groups.values:
        own = group["params"]
        undo.callback(group.__setitem__, "params", own)
        group["params"] = [outside.get(id(parameter), parameter) for parameter in own]


def _as_groups(model: nn.Module, parameters: GivenParameters | None) -> list[dict[str, Any]]:
    given: list[Any] = list(parameters) if parameters is not None else []
    if not given:
        return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    if not isinstance(given[0], Mapping):
        return [{"params": given}]
    for number, group in enumerate(given):
        unknown = [key for key in group if key not in (*_HYPER, "params", "name")]
        if unknown or "params" not in group:
            raise ConfigError(
                f"model_parameters: group {number} has {', '.join(map(repr, group))}.",
                remedy=f"A group has params, and of {', '.join(_HYPER)} and name what it wants.",
            )
    return [{**group, "params": _listed(group["params"])} for group in given]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _members(model: nn.Module, groups: tuple[dict[str, Any], ...]) -> dict[int, int]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                got = f"a parameter of shape {tuple(parameter.shape)}" if isinstance(parameter, torch.Tensor) else parameter
                raise ConfigError(
                    f"Parameter group {number} has {got}, which is no parameter of the model.",
                    remedy="Give parameters of the very module that is given as model.",
                )
            if id(parameter) in members:
                raise ConfigError(f"Parameter {names[id(parameter)]} is given twice.", remedy="Give each in one group.")
            members[id(parameter)] = number
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in members]
    if left_out:
        raise ConfigError(
            f"{len(left_out)} trainable parameters are in no group, the first of them {left_out[0]}.",
            remedy="Give them in a group, or freeze them with requires_grad_(False).",
        )
    return members


def _require_adam(optimizer: torch.optim.Optimizer) -> None:
    supported = "torch.optim.AdamW and torch.optim.Adam are supported; their arithmetic is infinity's own, on every tier."
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}.", remedy=supported)
    if optimizer.state:
        raise ConfigError(
            "optimizer has taken steps already; its moments would be lost.", remedy="Give one that has taken none."
        )
    for number, group in enumerate(optimizer.param_groups):
        wrong = [name for name in _ADAM_REFUSED if group.get(name)]
        known = (*_HYPER, *_ADAM_SWITCHES, *_ADAM_REFUSED, "params", "name")
        wrong += [name for name in group if name not in known]
        if wrong:
            raise ConfigError(f"optimizer: group {number} asks for {', '.join(wrong)}.", remedy="Leave it out.")
