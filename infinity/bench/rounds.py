"""Contenders in turn, round after round, so that what the machine does beside them meets all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_SHORTEST_SAMPLE_SECONDS = 0.02
_PAUSE_SECONDS = 0.005  # before each sample: OpenMP's threads spin a while before they sleep


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is timed; `run` does the work once."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one run of a contender, a number for each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def ratio_to(self, other: Timings) -> float:
        """Return how many times as fast as `other` this was: the median over the rounds, each compared in itself."""
        return median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


def time_in_turn(
    contenders: Sequence[Contender],
    num_rounds: int,
    *,
    on_round: Callable[[int], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Mapping[str, Timings]:
    """Run every contender once in each of `num_rounds` rounds, every other round in reverse order; return the times by name.

    A round before them warms up and is not counted. What is over too soon to be timed is run several times for one sample.
    """
    repeats = {}
    for contender in contenders:
        contender.run()  # pages, threads, and what a library compiles or allocates at first
        repeats[contender.name] = max(1, math.ceil(_SHORTEST_SAMPLE_SECONDS / max(_time(contender, 1, clock), 1e-9)))
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(num_rounds):
        on_round(number)
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            seconds[contender.name].append(_time(contender, repeats[contender.name], clock))
    return {name: Timings(tuple(values)) for name, values in seconds.items()}


def _time(contender: Contender, repeats: int, clock: Callable[[], float]) -> float:
    time.sleep(_PAUSE_SECONDS)
    start = clock()
    for _ in range(repeats):
        contender.run()
    return (clock() - start) / repeats
