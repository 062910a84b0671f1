"""Rank 0 writes what every rank has: the others give it their parts, unit by unit, and learn how the writing ended.

A disk that is full on rank 0 is the same error on every rank, and all of them go on; ranks without a disk in common work,
too. Before each unit rank 0 says whether there is one, so that an error costs the others the rest of one unit. An error of a
rank that gives, or any other exception, ends the group: nobody waits for that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from infinity.checkpoint.sources import HostData, UnitSource
from infinity.checkpoint.specs import TensorSpec
from infinity.comm.group import Group, Json
from infinity.comm.verdict import error_from_json, error_to_json
from infinity.errors import CommError, InfinityError

WRITER = 0
_NEXT_UNIT, _PATH = "next unit", "path"


class _Turn:
    """One unit on its way to the writer: a UnitSource."""

    def __init__(self, group: Group, unit: UnitSource, what: str) -> None:
        self._group = group
        self._unit = unit
        self._what = what
        self._running: Iterator[tuple[str, int, HostData]] | None = None
        self._has_ended = False

    @property
    def name(self) -> str:
        return self._unit.name

    @property
    def specs(self) -> Sequence[TensorSpec]:
        return self._unit.specs

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        """Tell the others that this unit comes, and give its pieces."""
        if self._group.size == 1:
            return iter(self._unit.pieces())  # where the writer fails it is over at once, and holds no tile
        self._group.gather(_NEXT_UNIT, what=self._what)
        self._running = self.give()  # it stays open where the writer fails: `finish` goes on with it
        return self._running

    def give(self) -> Iterator[tuple[str, int, HostData]]:
        """Give the pieces, together with every other rank."""
        yield from self._unit.pieces()
        self._has_ended = True

    def finish(self) -> bool:
        """Give what is left of a unit that was begun; False where giving it has failed."""
        if self._running is None:
            return True
        for _ in self._running:
            pass
        return self._has_ended


def write_together(
    group: Group, units: Sequence[UnitSource], write: Callable[[Sequence[UnitSource]], Path], *, what: str
) -> Path:
    """Call `write` with the units on rank 0 and return its path on every rank; every rank calls it, with its own units.

    An InfinityError of `write` is raised on every rank. Raises CommError where another rank cannot give its part.
    """
    turns = [_Turn(group, unit, what) for unit in units]
    error: InfinityError | None = None
    said: Json
    try:
        if group.rank == WRITER:
            try:
                said = {_PATH: str(write(turns))}
            except InfinityError as caught:
                if group.size > 1 and not all(turn.finish() for turn in turns):
                    raise
                error, said = caught, error_to_json(caught)
            group.gather(said, what=what)
        else:
            said = _follow(group, turns, what)
    except CommError:
        raise
    except BaseException as caught:
        group.fail(f"{what}: {type(caught).__name__}: {caught}")
        raise
    if error is not None:
        raise error
    if not isinstance(said, Mapping) or _PATH not in said:
        raise error_from_json(said, rank=WRITER)
    return Path(str(said[_PATH]))


def _follow(group: Group, turns: Sequence[_Turn], what: str) -> Json:
    """Give each unit that rank 0 asks for; return what it says at the end."""
    for turn in turns:
        said = group.gather(None, what=what)[WRITER]
        if said != _NEXT_UNIT:
            return said
        for _ in turn.give():
            pass
    return group.gather(None, what=what)[WRITER]
