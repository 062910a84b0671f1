"""What the user wants where: tiers for each model state, and overrides by name pattern. Frozen; resolved against units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isclose
from typing import Literal

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.placement.sizes import UnitSize
from infinity.states import Tier

Auto = Literal["auto"]
AUTO: Auto = "auto"
Shares = tuple[tuple[Tier, float], ...]  # of one unit's optimizer state; sums to 1
TierChoice = Tier | Auto
ShareChoice = Shares | Auto


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """What was asked for one unit; "auto" leaves the choice to the planner."""

    params: TierChoice = AUTO
    grads: TierChoice = AUTO
    optim: ShareChoice = AUTO


@dataclass(frozen=True, slots=True)
class Override:
    """What was asked for the units that a pattern matches; None leaves what was asked before."""

    pattern: str
    params: TierChoice | None = None
    grads: TierChoice | None = None
    optim: ShareChoice | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """For every unit and model state, what was asked; `stage` None leaves the stage to the planner."""

    stage: int | None = None
    default: UnitPlacement = UnitPlacement()
    overrides: tuple[Override, ...] = ()

    @classmethod
    def from_config(cls, config: Config) -> Placement:
        """Read `zero_optimization`. Raises ConfigError for a ratio without a device that is offloaded to."""
        zero = config.zero_optimization
        device, ratio = zero.offload_optimizer.device, zero.offload_optimizer.ratio
        optim: str | Mapping[str, float] = _tier_word(device)
        if ratio < 1.0 and device not in ("cpu", "nvme"):
            raise ConfigError(
                f"zero_optimization.offload_optimizer.ratio: {ratio} is the share to offload, but the device is {device}.",
                remedy="Set device to cpu or nvme.",
            )
        if ratio < 1.0:
            optim = {"gpu": 1.0 - ratio, device: ratio}
        default = UnitPlacement(
            params=_tier(_tier_word(zero.offload_param.device), "params"),
            optim=_shares(optim, "optim"),
        )
        return cls(stage=zero.stage, default=default)

    def override(
        self,
        pattern: str,
        *,
        optim: str | Mapping[str, float] | None = None,
        params: str | Mapping[str, float] | None = None,
        grads: str | Mapping[str, float] | None = None,
    ) -> Placement:
        """Return a placement that asks for these tiers in the units that `pattern` matches; the last one that matches wins.

        `pattern` is a glob over unit or parameter names ("blocks.[0-3].*"). Tiers are "gpu", "cpu", "nvme" or "auto";
        `optim` may also be shares that sum to 1, such as {"cpu": 0.5, "nvme": 0.5}. Raises ConfigError for anything else.
        """
        if optim is None and params is None and grads is None:
            raise ConfigError(f"Placement.override({pattern!r}): asks for nothing.", remedy="Give optim, params or grads.")
        added = Override(
            pattern,
            params=None if params is None else _tier(params, "params"),
            grads=None if grads is None else _tier(grads, "grads"),
            optim=None if optim is None else _shares(optim, "optim"),
        )
        return replace(self, overrides=(*self.overrides, added))

    def resolve(self, units: Sequence[UnitSize]) -> tuple[UnitPlacement, ...]:
        """Return what is asked for each unit.

        Raises ConfigError for a pattern that matches nothing, or only some of a unit's parameters.
        """
        chosen = [self.default] * len(units)
        for rule in self.overrides:
            matching = [index for index, unit in enumerate(units) if _matches(rule.pattern, unit)]
            if not matching:
                raise _matches_nothing(rule.pattern, units)
            for index in matching:
                current = chosen[index]
                chosen[index] = UnitPlacement(
                    params=current.params if rule.params is None else rule.params,
                    grads=current.grads if rule.grads is None else rule.grads,
                    optim=current.optim if rule.optim is None else rule.optim,
                )
        return tuple(chosen)


def _matches(pattern: str, unit: UnitSize) -> bool:
    if fnmatchcase(unit.name, pattern):
        return True
    matched = [name for name in unit.parameter_names if fnmatchcase(name, pattern)]
    if matched and len(matched) < len(unit.parameter_names):
        others = [name for name in unit.parameter_names if name not in matched]
        raise ConfigError(
            f"Placement pattern {pattern!r} matches {len(matched)} of {len(unit.parameter_names)} parameters of unit "
            f"{unit.name!r}: {matched[0]!r}, but not {others[0]!r}.",
            remedy=f"Placement is per unit; write {unit.name!r} or a pattern that matches the whole unit.",
        )
    return bool(matched)


def _matches_nothing(pattern: str, units: Sequence[UnitSize]) -> ConfigError:
    names = [unit.name for unit in units] + [name for unit in units for name in unit.parameter_names]
    near = get_close_matches(pattern, names, n=3, cutoff=0.4) or [unit.name for unit in units[:3]]
    return ConfigError(
        f"Placement pattern {pattern!r} matches no unit and no parameter.",
        remedy=f"Near it are {', '.join(repr(name) for name in near)}.",
    )


def _tier_word(device: str) -> str:
    return "gpu" if device == "none" else device


def _tier(asked: str | Mapping[str, float], state: str) -> TierChoice:
    shares = _shares(asked, state)
    if shares == AUTO:
        return AUTO
    if len(shares) != 1:
        raise ConfigError(
            f"Placement of {state}: {dict(asked) if isinstance(asked, Mapping) else asked!r} splits a unit over tiers.",
            remedy=f"In this release {state} live whole in one tier for each unit; only optim takes shares.",
        )
    return shares[0][0]


def _shares(asked: str | Mapping[str, float], state: str) -> ShareChoice:
    if asked == AUTO:
        return AUTO
    shares = {asked: 1.0} if isinstance(asked, str) else asked
    if not isinstance(shares, Mapping):
        raise ConfigError(f"Placement of {state}: {asked!r} is neither a tier nor shares.", remedy=_EXAMPLE)
    for name, share in shares.items():
        if name not in tuple(tier.value for tier in Tier):
            near = get_close_matches(str(name), [tier.value for tier in Tier], n=1)
            raise ConfigError(
                f"Placement of {state}: {name!r} is no tier{f'; did you mean {near[0]!r}?' if near else '.'}",
                remedy=_EXAMPLE,
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
            raise ConfigError(
                f"Placement of {state}: the share {share!r} of {name} is not between 0 and 1.", remedy=_EXAMPLE
            )
    total = sum(shares.values())
    if not isclose(total, 1.0, abs_tol=1e-6):
        raise ConfigError(f"Placement of {state}: the shares {dict(shares)} sum to {total:.6g}, not to 1.", remedy=_EXAMPLE)
    return tuple((tier, float(shares[tier.value])) for tier in Tier if shares.get(tier.value, 0.0) > 0.0)


_EXAMPLE = 'Write "gpu", "cpu", "nvme", "auto", or for optim shares such as {"cpu": 0.5, "nvme": 0.5}.'
