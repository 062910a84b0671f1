"""Parameter groups: which parameters the optimizer trains with which hyper-parameters, as users say it in torch.

They come from `initialize(model_parameters=...)` (parameters, or groups as torch.optim takes them), or from an optimizer of
torch whose groups are taken over as they are. Without either there is one group with all trainable parameters. Adam and
AdamW are infinity's own arithmetic; every other optimizer makes its updates itself (`optim.torch_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.config.optimizer import OptimizerSection
from infinity.errors import ConfigError
from infinity.optim.torch_optimizers import is_known, make_torch_optimizer, require_parts, require_usable, values_an_element
from infinity.optim.torch_rule import MasterPiece, take_over_state
from infinity.store.unit_size import UnitLayouts
from infinity.zero.shard import Shard

GivenParameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
GivenOptimizer = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_NOT_NATIVE = ("amsgrad", "maximize", "differentiable")  # of torch's Adam: what the kernel does not do
_MADE_HERE = "; Adam and AdamW are made by infinity's own kernel, on every tier and beside the next forward."


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a model's trainable parameters; `values` are dicts as torch's, `members` the parameters by identity."""

    values: tuple[dict[str, Any], ...]
    members: Mapping[int, int]  # id of a parameter -> its group
    defaults: Mapping[str, Any]  # of the hyper-parameters
    own_rule: TorchOptimizer | None = None  # makes the updates; None: infinity's Adam does
    decoupled: bool | None = None  # whether that Adam is AdamW
    notes: tuple[str, ...] = ()

    def index_of(self, parameter: nn.Parameter) -> int:
        return self.members.get(id(parameter), 0)

    def parts_notes(self, layouts: Sequence[UnitLayouts]) -> tuple[str, ...]:
        """Return what is to be said where ranks own parts of parameters. Raises ConfigError where whole ones are needed."""
        rule = self.own_rule
        if rule is None or not any(one.is_split for one in layouts):
            return ()
        note = require_parts(rule.name, is_known=rule.given is None or is_known(rule.given))
        return () if note is None else (note,)

    @property
    def torch_values(self) -> int | None:
        """The fp32 values an element that an optimizer of torch keeps, 0 where nobody knows; None for infinity's Adam."""
        return None if self.own_rule is None else self.own_rule.num_values


@dataclass(frozen=True, slots=True)
class TorchOptimizer:
    """An optimizer of torch that makes updates: one that was given, or the configuration's, made when masters exist."""

    name: str
    num_values: int  # fp32 an element that it keeps, as far as is known before its first step
    given: torch.optim.Optimizer | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)

    def over(
        self, groups: Sequence[dict[str, Any]], own: Mapping[str, nn.Parameter], pieces: Sequence[Sequence[MasterPiece]]
    ) -> torch.optim.Optimizer:
        """Return the optimizer of these pieces; its groups are those of `groups`, `own` the user's parameters by name.

        Raises ConfigError for state on the meta device.
        """
        if self.given is not None:
            take_over_state(self.given, own, [piece for group in pieces for piece in group])
            return self.given
        made = make_torch_optimizer(self.name, _with(groups, pieces), self.hyper_parameters)
        for group, filled in zip(groups, made.param_groups, strict=True):
            group.update({key: value for key, value in filled.items() if key != "params"})
        made.param_groups = list(groups)
        return made


def _with(groups: Sequence[dict[str, Any]], pieces: Sequence[Sequence[MasterPiece]]) -> list[dict[str, Any]]:
    return [{**group, "params": [piece.master for piece in own]} for group, own in zip(groups, pieces, strict=True)]


def groups_of(
    model: nn.Module, section: OptimizerSection, parameters: GivenParameters | None, optimizer: GivenOptimizer | None
) -> Groups:
    """Return the groups that the user asks for.

    Raises ConfigError for an optimizer that cannot be served, for a trainable parameter in no group, for one that is no part
    of the model, one in two groups, and a group key that means nothing.
    """
    if optimizer is not None:
        listed = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
        return _taken_over(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(listed))
    defaults = section.values()
    values = tuple({**defaults, **group} for group in _as_groups(model, parameters, tuple(defaults)))
    members = _members(model, values)
    if section.is_native:
        return Groups(values, members, defaults, decoupled=section.decoupled)
    trial = make_torch_optimizer(section.type, [{**group, "params": [torch.zeros(1)]} for group in values], defaults)
    rule = TorchOptimizer(section.type, values_an_element(trial), hyper_parameters=defaults)
    return Groups(values, members, defaults, rule, notes=(_performance_note(section.type),))


def _taken_over(model: nn.Module, taken: torch.optim.Optimizer) -> Groups:
    require_usable(taken)
    name, values = type(taken).__name__, tuple(taken.param_groups)
    members = _members(model, values)
    note = f"optimizer: the {name} given to initialize is used, not the configuration's."
    decoupled = _decoupled(taken)
    if decoupled is None:
        rule = TorchOptimizer(name, values_an_element(taken), given=taken)
        return Groups(values, members, taken.defaults, rule, notes=(note, _performance_note(name)))
    if taken.state:
        raise ConfigError(
            "optimizer has taken steps already; its moments would be lost.", remedy="Give one that has taken none."
        )
    return Groups(values, members, taken.defaults, decoupled=decoupled, notes=(note,))


def _decoupled(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return how an Adam of torch decays weights; None for one whose arithmetic is not the kernel's."""
    if type(optimizer) not in _ADAMS or any(group.get(name) for group in optimizer.param_groups for name in _NOT_NATIVE):
        return None
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    found = {bool(group.get("decoupled_weight_decay", is_adamw)) for group in optimizer.param_groups}
    return found.pop() if len(found) == 1 else None


def _performance_note(name: str) -> str:
    return f"optimizer: {name} is torch's and updates fp32 masters in RAM before step() returns{_MADE_HERE}"


def put_into_place(groups: Groups, shards: Sequence[Shard], undo: ExitStack) -> None:
    """Let every group hold what the modules now hold in the place of its parameters."""
    outside = {id(use.parameter): shard.outside[use.name] for shard in shards for use in shard.group.uses}
    for group in groups.values:
        own = group["params"]
        undo.callback(group.__setitem__, "params", own)
        group["params"] = [outside.get(id(parameter), parameter) for parameter in own]


def _as_groups(model: nn.Module, parameters: GivenParameters | None, known: tuple[str, ...]) -> list[dict[str, Any]]:
    given: list[Any] = list(parameters) if parameters is not None else []
    if not given:
        return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    if not isinstance(given[0], Mapping):
        return [{"params": given}]
    for number, group in enumerate(given):
        unknown = [key for key in group if key not in (*known, "params", "name")]
        if unknown or "params" not in group:
            raise ConfigError(
                f"model_parameters: group {number} has {', '.join(map(repr, group))}.",
                remedy=f"A group has params, and of {', '.join(known)} and name what it wants.",
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
