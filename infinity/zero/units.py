"""Which modules are units, and which parameters belong together: the model cut into pieces that fit.

A unit is a module whose call is one step of the walk through the model: an element of a ModuleList or Sequential (a
transformer block), or a leaf module with a matrix (an embedding, the head). Parameters of no unit, such as a final norm,
form the root group. Parameters that several units use (tied weights) form a group of their own, which each of them needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from infinity.errors import ConfigError

ROOT = "root"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a parameter: `module.<attribute>`."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """One parameter of the model with every place that holds it."""

    name: str  # its first name in model.named_parameters()
    aliases: tuple[str, ...]  # its other names
    parameter: nn.Parameter  # as the user made it; freed when the engine has taken its values
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """One module whose call is one step of the walk through the model."""

    index: int
    name: str
    module: nn.Module
    groups: tuple[int, ...]  # the parameter groups that a call needs


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are stored, moved and updated together; the whole of one shard."""

    index: int
    name: str
    uses: tuple[ParameterUse, ...]
    units: tuple[int, ...]  # the units that need it; empty for the root group


def cut_model(model: nn.Module, patterns: Sequence[str] = ()) -> tuple[tuple[Unit, ...], tuple[ParameterGroup, ...]]:
    """Return the model's units in order of registration and its parameter groups, the root group (if any) last.

    `patterns` are class names or name patterns ("blocks.*") of the modules that are units; without any, the rule in the
    module docstring decides. Raises ConfigError for a pattern that matches no module.
    """
    modules = _unit_modules(model, patterns)
    uses = _parameter_uses(model)
    inside = [frozenset(id(part) for part in module.modules()) for _, module in modules]
    users: dict[tuple[int, ...], list[ParameterUse]] = {}
    for use in uses:
        homes = [{unit for unit, parts in enumerate(inside) if id(place.module) in parts} for place in use.places]
        key = tuple(sorted(set().union(*homes))) if all(homes) else ()
        users.setdefault(key, []).append(use)
    root = users.pop((), [])
    groups = [
        ParameterGroup(index, _group_name(key, [name for name, _ in modules], members), tuple(members), key)
        for index, (key, members) in enumerate(sorted(users.items(), key=lambda item: (item[0][0], len(item[0]))))
    ]
    if root:
        groups.append(ParameterGroup(len(groups), ROOT, tuple(root), ()))
    units = tuple(
        Unit(index, name, module, _needed(index, inside[index], groups)) for index, (name, module) in enumerate(modules)
    )
    return units, tuple(groups)


def _needed(unit: int, parts: frozenset[int], groups: Sequence[ParameterGroup]) -> tuple[int, ...]:
    return tuple(
        group.index
        for group in groups
        if unit in group.units or any(id(place.module) in parts for use in group.uses for place in use.places)
    )


def _group_name(key: tuple[int, ...], unit_names: Sequence[str], members: Sequence[ParameterUse]) -> str:
    return unit_names[key[0]] if len(key) == 1 else f"tied:{members[0].name}"


def _unit_modules(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    matched: set[str] = set()

    def matches(name: str, module: nn.Module) -> bool:
        hits = [pattern for pattern in patterns if pattern == type(module).__name__ or fnmatchcase(name, pattern)]
        matched.update(hits)
        return bool(hits)

    def walk(name: str, module: nn.Module, in_container: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = list(module.parameters())
        is_unit = matches(name, module) if patterns else _is_unit(module, own, in_container)
        if own and is_unit and not isinstance(module, _WITHOUT_FORWARD):
            found.append((name or type(module).__name__, module))
            seen.update(id(part) for part in module.modules())
            return
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child, isinstance(module, _CONTAINERS))

    walk("", model, False)
    unmatched = [pattern for pattern in patterns if pattern not in matched]
    if unmatched:
        raise ConfigError(
            f"infinity.units: {unmatched[0]!r} matches no module of {type(model).__name__}.",
            remedy="Give class names or name patterns as model.named_modules() shows them.",
        )
    return found


def _is_unit(module: nn.Module, own: Sequence[nn.Parameter], in_container: bool) -> bool:
    if in_container and not isinstance(module, _CONTAINERS):
        return bool(own)
    is_leaf = not any(True for _ in module.children())
    # Attention uses the matrix of its output projection without calling that module.
    return (is_leaf or isinstance(module, nn.MultiheadAttention)) and any(parameter.ndim >= 2 for parameter in own)


def _parameter_uses(model: nn.Module) -> list[ParameterUse]:
    names: dict[int, list[str]] = {}
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    visited: set[int] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(f"{module_name}.{attribute}" if module_name else attribute)
            if id(module) not in visited:
                places.setdefault(id(parameter), []).append(Place(module, attribute))
        visited.add(id(module))
    return [
        ParameterUse(names[key][0], tuple(names[key][1:]), parameter, tuple(places[key]))
        for key, parameter in parameters.items()
    ]
