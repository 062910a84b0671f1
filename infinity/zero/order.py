"""In which order micro-batches visit the units, learnt from one of them, and what follows from it for loading weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.zero.micro_batch import Visit

# The shards that each visit of a way needs, in order.
ShardOrder = tuple[tuple[int, ...], ...]


class UnitOrder:
    """The learnt way through the units. Until one is known, units are taken in order of registration."""

    def __init__(self, num_units: int) -> None:
        self._visits: tuple[Visit, ...] = tuple(Visit(unit, 0) for unit in range(num_units))
        self._ranks: dict[Visit, int] = {}
        self.known = self.knows_tail = False
        self.tail: Visit | None = None  # where the tail begins; None where the loss cannot be separated from what is before

    def learn(self, visits: Sequence[Visit]) -> None:
        """Take a micro-batch's visits as the order of all. Nothing is said of a tail."""
        self._visits = tuple(visits)
        self._ranks = {visit: rank for rank, visit in enumerate(visits)}
        self.known = True

    def learn_with_tail(self, visits: Sequence[Visit], tail: Visit | None) -> None:
        """Take a micro-batch's visits as the order of all, and where its tail begins, if anywhere."""
        self.learn(visits)
        self.tail, self.knows_tail = tail, True

    def rank(self, before: Sequence[Visit], waiting_at: Visit | None) -> float:
        """Return how far along the way a micro-batch is that waits at a visit after having made others.

        A visit off the learnt way comes right after the last known one.
        """
        known = self._ranks.get(waiting_at) if waiting_at is not None else None
        if known is not None:
            return float(known)
        latest = max((self._ranks[visit] for visit in before if visit in self._ranks), default=-1)
        return latest + 0.5

    def vertical_sequence(self, groups: Callable[[int], Sequence[int]]) -> ShardOrder:
        """Return the shards in the order in which a vertical step asks for them: there and back, the tail once."""
        there = [tuple(groups(visit.unit)) for visit in self._visits]
        return tuple(there + there[: self._visits.index(self.tail) if self.tail is not None else None][::-1])

    def horizontal_sequence(self, groups: Callable[[int], Sequence[int]], num_micro_batches: int) -> ShardOrder:
        """Return the same for a horizontal step: there and back for each micro-batch."""
        there = [tuple(groups(visit.unit)) for visit in self._visits]
        return tuple(there + there[::-1]) * num_micro_batches
