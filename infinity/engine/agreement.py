"""What ranks tell each other so that all of them take the same step: exchanges of small values.

Norm, finiteness, touched parameters and the mean loss follow from it; sums of squares come in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

from infinity.comm.group import Group, Json
from infinity.comm.verdict import together
from infinity.engine.waiting_gradients import GradientFacts
from infinity.errors import ConfigError, ModelError
from infinity.store.unit_size import UnitLayouts
from infinity.zero.turns import Turns


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    """A step as all ranks see it."""

    gradients: GradientFacts  # sums of squares by rank, and by shard within it; touched on any rank
    losses: tuple[float, ...]  # of every micro-batch, by rank
    loss: float  # their weighted mean


class Agreement:
    """Exchanges the facts of a step. Every rank calls it at the same point."""

    def __init__(self, group: Group, layouts: Sequence[UnitLayouts], turns: Turns | None) -> None:
        self._group = group
        self._names = tuple(tuple(spec.name for spec in one.whole.specs) for one in layouts)
        self._turns = turns

    def step(
        self, facts: GradientFacts, losses: Sequence[float], shares: Sequence[float], settings: Mapping[str, object]
    ) -> AgreedFacts:
        """Return what is known of the step on all ranks; `shares` of the mean add up to 1 over all of them.

        `settings` are what the update depends on, by name, as JSON has them. Raises, on every rank, ConfigError where they
        differ and ModelError where the shares do not add up.
        """
        mine = {
            "sums": list(facts.sums_of_squares),
            "touched": self._bits(facts.touched),
            "not_finite": facts.first_not_finite,
            "losses": list(losses),
            "shares": list(shares),
            "settings": dict(settings),
            "turns": list(self._turns.observed) if self._turns is not None else [],
        }
        ranks = cast(list[dict[str, Any]], self._group.gather(cast(Json, mine), what="the step's facts"))
        if self._turns is not None:
            self._turns.agree(ranks[0]["turns"])
        _require_same([one["settings"] for one in ranks])
        all_losses = [float(loss) for one in ranks for loss in one["losses"]]
        all_shares = [float(share) for one in ranks for share in one["shares"]]
        if all_shares and abs(sum(all_shares) - 1.0) > 1e-6:
            counts = ", ".join(str(len(one["losses"])) for one in ranks)
            raise ModelError(
                f"The ranks' micro-batches ({counts}) do not make up one mean: their shares add up to {sum(all_shares):g}.",
                remedy="Give every rank as many; in vertical order weights (token counts) do, too.",
            )
        gradients = GradientFacts(
            sums_of_squares=tuple(float(total) for one in ranks for total in one["sums"]),
            touched=self._together([one["touched"] for one in ranks]),
            first_not_finite=next((one["not_finite"] for one in ranks if one["not_finite"] is not None), None),
        )
        loss = sum(loss * share for loss, share in zip(all_losses, all_shares, strict=True))
        return AgreedFacts(gradients, tuple(all_losses), loss)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Return a block whose error on one rank is raised on all."""
        return together(self._group, what=what)

    def touched(self, touched: Mapping[int, frozenset[str]]) -> dict[int, frozenset[str]]:
        """Return which parameters got a gradient on any rank, by shard."""
        ranks = self._group.gather(cast(Json, self._bits(touched)), what="which parameters have gradients")
        return self._together(cast(list[dict[str, int]], ranks))

    def total(self, weights: Sequence[float]) -> float:
        """Return the sum of all ranks' weights of micro-batches."""
        return sum(cast(list[float], self._group.gather(float(sum(weights)), what="the weights of micro-batches")))

    def _bits(self, touched: Mapping[int, frozenset[str]]) -> dict[str, int]:
        """Return the parameters by their place in the unit: bit i of a shard's number."""
        return {
            str(shard): sum(1 << place for place, name in enumerate(self._names[shard]) if name in names)
            for shard, names in touched.items()
            if names
        }

    def _together(self, ranks: Sequence[Mapping[str, int]]) -> dict[int, frozenset[str]]:
        bits: dict[int, int] = {}
        for one in ranks:
            for shard, theirs in one.items():
                bits[int(shard)] = bits.get(int(shard), 0) | int(theirs)
        return {
            shard: frozenset(name for place, name in enumerate(self._names[shard]) if together >> place & 1)
            for shard, together in sorted(bits.items())
        }


def _require_same(ranks: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigError for the first setting that two ranks have differently: their weights would drift apart."""
    for rank, settings in enumerate(ranks):
        for name in (*ranks[0], *settings):
            if name not in ranks[0] or name not in settings or settings[name] != ranks[0][name]:
                raise ConfigError(
                    f"{name} is {ranks[0].get(name)!r} on rank 0 and {settings.get(name)!r} on rank {rank}.",
                    remedy="Give all ranks one configuration, and schedulers that look at a loss that of all ranks.",
                )
