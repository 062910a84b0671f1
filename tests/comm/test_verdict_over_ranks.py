"""What fails on one rank fails on all, with the same class, and nobody waits for anybody."""

from __future__ import annotations

import pytest
from rank_threads import on_every_rank, open_threads, ranks

from infinity.comm.group import Group
from infinity.comm.local import Local
from infinity.comm.verdict import error_from_json, error_to_json, together
from infinity.errors import CheckpointMismatch, CommError, InfinityError, StorageError, SwapSpaceError


def work(group: Group, errors: dict[int, InfinityError]) -> str:
    with together(group, what="looking"):
        if group.rank in errors:
            raise errors[group.rank]
    return "done"


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    """The rank itself keeps its error, the others get one of the same class that names the rank; the group goes on."""
    errors: dict[int, InfinityError] = {
        1: CheckpointMismatch("another model", remedy="Take its own."),
        2: StorageError("no medium"),
    }
    with ranks(3) as groups:
        first, second, third = on_every_rank(3, lambda rank: work(groups[rank], errors))
        assert on_every_rank(3, lambda rank: work(groups[rank], {})) == ["done"] * 3
    assert type(first) is CheckpointMismatch
    assert str(first) == "Rank 1: another model Take its own."
    assert second is errors[1]
    assert third is errors[2]


def test_any_other_exception_ends_the_group() -> None:
    """A bug on one rank is nothing that the others could raise: they hear of it, and do not wait."""
    groups = open_threads(2)

    def work_with_a_bug(rank: int) -> None:
        with together(groups[rank], what="looking"):
            if rank == 1:
                raise KeyError("bug")

    first, second = on_every_rank(2, work_with_a_bug)
    assert isinstance(second, KeyError)
    assert isinstance(first, CommError)
    assert "looking: KeyError: 'bug'" in str(first)


def test_one_rank_raises_its_own_error() -> None:
    """Alone there is nobody to tell."""
    error = SwapSpaceError("full")
    with pytest.raises(SwapSpaceError) as caught:
        work(Local(), {0: error})
    assert caught.value is error
    assert work(Local(), {}) == "done"


def test_errors_travel_as_what_they_are() -> None:
    """Class, message and remedy survive; what is no error is a CommError."""
    again = error_from_json(error_to_json(SwapSpaceError("full", remedy="Make room.")), rank=0)
    assert type(again) is SwapSpaceError
    assert (again.message, again.remedy) == ("Rank 0: full", "Make room.")
    assert isinstance(error_from_json("what?", rank=3), CommError)
