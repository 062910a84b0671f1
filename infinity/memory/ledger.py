"""The ledger: budget, used and peak bytes per tier and owner. It is asked before anything is allocated."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.byte_sizes import format_bytes
from infinity.errors import IllegalTransition, OverBudget
from infinity.states import Tier

_NUM_HOLDERS_NAMED = 4


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """What one owner holds in one tier, and the most it ever held."""

    tier: Tier
    owner: str
    used_bytes: int
    peak_bytes: int


class Ledger:
    """The one owner of the question "may these bytes live here?".

    A tier that is absent from `budgets`, or whose budget is None, is counted but not limited. Safe to use from any thread.
    An owner's entry is either *taken* and given back piece by piece, or *observed*: set to what was measured.
    After an exception nothing has changed.
    """

    def __init__(self, budgets: Mapping[Tier, int | None]) -> None:
        self._budgets = dict(budgets)
        self._lock = threading.Lock()
        self._used: dict[tuple[Tier, str], int] = {}
        self._peak: dict[tuple[Tier, str], int] = {}
        self._tier_used = dict.fromkeys(Tier, 0)
        self._tier_peak = dict.fromkeys(Tier, 0)

    def take(self, tier: Tier, owner: str, num_bytes: int) -> None:
        """Book `num_bytes` for `owner`, before they are allocated. Raises OverBudget when the tier's budget forbids it."""
        _require_not_negative(tier, owner, num_bytes)
        with self._lock:
            budget = self._budgets.get(tier)
            if budget is not None and num_bytes > budget - self._tier_used[tier]:
                raise self._over_budget(tier, owner, num_bytes, budget)
            self._set(tier, owner, self._used.get((tier, owner), 0) + num_bytes)

    def give(self, tier: Tier, owner: str, num_bytes: int) -> None:
        """Return `num_bytes` that `owner` took. Raises IllegalTransition when it does not hold as many."""
        _require_not_negative(tier, owner, num_bytes)
        with self._lock:
            held = self._used.get((tier, owner), 0)
            if num_bytes > held:
                raise IllegalTransition(f"Ledger: {owner} gives {num_bytes} bytes of {tier.value} back and holds {held}.")
            self._set(tier, owner, held - num_bytes)

    def observe(self, tier: Tier, owner: str, num_bytes: int) -> int:
        """Set the entry of `owner` to a measured size, and return by how many bytes the tier is now over its budget.

        For memory that nobody asks for, such as the activations that torch allocates inside a unit: it is there already, so
        it is never refused, but later takes find that much less room. 0 means that the tier is within its budget.
        """
        _require_not_negative(tier, owner, num_bytes)
        with self._lock:
            self._set(tier, owner, num_bytes)
            budget = self._budgets.get(tier)
            return 0 if budget is None else max(0, self._tier_used[tier] - budget)

    def used(self, tier: Tier) -> int:
        """Return the bytes in use in `tier`."""
        with self._lock:
            return self._tier_used[tier]

    def peak(self, tier: Tier) -> int:
        """Return the most bytes that were ever in use in `tier` at one time."""
        with self._lock:
            return self._tier_peak[tier]

    def budget(self, tier: Tier) -> int | None:
        """Return the budget of `tier`; None where there is no limit."""
        return self._budgets.get(tier)

    def report(self) -> tuple[LedgerLine, ...]:
        """Return a line for every owner that ever held something: by tier, the largest peak first."""
        with self._lock:
            lines = [LedgerLine(tier, owner, used, self._peak[tier, owner]) for (tier, owner), used in self._used.items()]
        order = list(Tier)
        return tuple(sorted(lines, key=lambda line: (order.index(line.tier), -line.peak_bytes, line.owner)))

    def _set(self, tier: Tier, owner: str, num_bytes: int) -> None:
        key = (tier, owner)
        self._tier_used[tier] += num_bytes - self._used.get(key, 0)
        self._used[key] = num_bytes
        self._peak[key] = max(self._peak.get(key, 0), num_bytes)
        self._tier_peak[tier] = max(self._tier_peak[tier], self._tier_used[tier])

    def _over_budget(self, tier: Tier, owner: str, asked: int, budget: int) -> OverBudget:
        used = self._tier_used[tier]
        held = [(num_bytes, name) for (where, name), num_bytes in self._used.items() if where is tier and num_bytes]
        largest = sorted(held, reverse=True)[:_NUM_HOLDERS_NAMED]
        holders = ", ".join(f"{name} {format_bytes(num_bytes)}" for num_bytes, name in largest) or "nobody"
        return OverBudget(
            f"{tier.value} memory: {owner} asks for {format_bytes(asked)} ({asked} bytes), but {format_bytes(used)} of the "
            f"budget of {format_bytes(budget)} are used; largest holders: {holders}.",
            remedy=f"Raise the {tier.value} memory budget by at least {format_bytes(used + asked - budget)}, "
            "or move more state to a slower tier.",
        )


def _require_not_negative(tier: Tier, owner: str, num_bytes: int) -> None:
    if num_bytes < 0:
        raise IllegalTransition(f"Ledger: {owner} names {num_bytes} bytes of {tier.value}; a size is not negative.")
