"""In which order shards become final: at once on one rank, in one order that all ranks agree on where there are several.

Every shard is final once in every step, also one that nobody touched, so that the ranks' reductions meet whichever units the
data of a rank went through. A shard that is ready before its turn waits, with its sums. The order is that in which shards
became ready on rank 0 in the step before; at first it is from the last unit to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.zero.shard import Shard


class Turns:
    """The turns of one step after another. One thread."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._num_over = 0
        self._ready: dict[int, None] = {}  # in the order in which they came
        self.observed = self._order  # in which they became ready in the last step or micro-batch; those that did not, last

    def agree(self, order: Sequence[int]) -> None:
        """Take the order of the steps to come."""
        self._order = tuple(order)

    def ready(self, shard: int) -> Iterator[int]:
        """A shard is final as far as this rank goes: yield those whose turn has come. One that has no turn is ignored."""
        if shard in self._order:
            self._ready.setdefault(shard)
        while self._num_over < len(self._order) and self._order[self._num_over] in self._ready:
            self._num_over += 1
            yield self._order[self._num_over - 1]

    def rest(self) -> Iterator[int]:
        """Yield all others in their turn: nothing more is to come."""
        while self._num_over < len(self._order):
            self._num_over += 1
            yield self._order[self._num_over - 1]

    def begin(self) -> None:
        """Begin anew: with the next step or micro-batch."""
        if self._ready:
            self.observed = (*self._ready, *(shard for shard in self._order if shard not in self._ready))
        self._num_over = 0
        self._ready.clear()


def first_turns(shards: Sequence[Shard]) -> Turns:
    """Return the turns of the shards that have a gradient: units from last to first, then parameters of no unit."""
    trained = [shard for shard in reversed(shards) if shard.whole.num_state_elements]
    return Turns([shard.index for shard in sorted(trained, key=lambda shard: not shard.group.units)])
