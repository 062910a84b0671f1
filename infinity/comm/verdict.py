"""An error of one rank as an error of all: what every rank does for itself either succeeds everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from infinity.comm.group import Group, Json
from infinity.errors import CommError, InfinityError


@contextmanager
def together(group: Group, *, what: str) -> Iterator[None]:
    """Run the block on every rank; where it raises an InfinityError on one, it raises one of the same class on all.

    The block makes no calls of the group. Where several ranks fail, each raises its own error, the others the first.
    Any other exception ends the group.
    """
    error: InfinityError | None = None
    try:
        yield
    except InfinityError as caught:
        error = caught
    except BaseException as caught:
        group.fail(f"{what}: {type(caught).__name__}: {caught}")
        raise
    outcomes = group.gather(None if error is None else error_to_json(error), what=what)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            raise error_from_json(outcome, rank=rank)


def error_to_json(error: InfinityError) -> dict[str, Json]:
    """Return what `error_from_json` needs on another rank."""
    return {"class": type(error).__name__, "message": error.message, "remedy": error.remedy}


def error_from_json(said: Json, *, rank: int) -> InfinityError:
    """Return the error that rank `rank` has, for this one to raise."""
    if not isinstance(said, Mapping):
        return CommError(f"Rank {rank} failed and did not say how: {said!r}.")
    kind = _classes(InfinityError).get(str(said.get("class")), InfinityError)
    return kind(f"Rank {rank}: {said.get('message')}", remedy=str(said.get("remedy", "")))


def _classes(root: type[InfinityError]) -> dict[str, type[InfinityError]]:
    found = {root.__name__: root}
    for below in root.__subclasses__():
        found.update(_classes(below))
    return found
