"""In which order micro-batches visit the units, learnt from one of them, and what follows from it for loading weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.zero.micro_batch import Visit


class UnitOrder:
    """The learnt way through the units. Until one is known, units are taken in order of registration."""

    def __init__(self, num_units: int) -> None:
        self._visits: tuple[Visit, ...] = tuple(Visit(unit, 0) for unit in range(num_units))
        self._ranks: dict[Visit, int] = {}
        self.known = False
        self.separable = False  # whether the loss reaches earlier units only through the last visit's inputs

    @property
    def last(self) -> Visit | None:
        return self._visits[-1] if self._visits else None

    def learn(self, visits: Sequence[Visit], *, separable: bool) -> None:
        """Take a micro-batch's visits as the order of all."""
        self._visits = tuple(visits)
        self._ranks = {visit: rank for rank, visit in enumerate(visits)}
        self.separable = separable
        self.known = True

    def rank(self, before: Sequence[Visit], waiting_at: Visit | None) -> float:
        """Return how far along the way a micro-batch is that waits at a visit after having made others.

        A visit off the learnt way comes right after the last known one.
        """
        known = self._ranks.get(waiting_at) if waiting_at is not None else None
        if known is not None:
            return float(known)
        latest = max((self._ranks[visit] for visit in before if visit in self._ranks), default=-1)
        return latest + 0.5

    def vertical_sequence(self, groups: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
        """Return the shards in the order in which a vertical step asks for them: there and back, the last unit once."""
        there = [shard for visit in self._visits for shard in groups(visit.unit)]
        body = self._visits[:-1] if self.separable else self._visits
        back = [shard for visit in reversed(body) for shard in groups(visit.unit)]
        return tuple(there + back)

    def horizontal_sequence(self, groups: Callable[[int], Sequence[int]], num_micro_batches: int) -> tuple[int, ...]:
        """Return the same for a horizontal step: there and back for each micro-batch."""
        there = [shard for visit in self._visits for shard in groups(visit.unit)]
        back = [shard for visit in reversed(self._visits) for shard in groups(visit.unit)]
        return tuple(there + back) * num_micro_batches
