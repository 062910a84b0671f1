"""The watch when the store itself fails: it ends with an error, or answers no more."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from infinity.comm.beats import Beat, RankState, to_json
from infinity.comm.order import Order
from infinity.comm.watch import Pace, Watch
from infinity.errors import CommError


class FailingStore:
    """Answers a few times for one living rank 1, then does what `end` does."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._num_answers = 0

    def set(self, key: str, value: str) -> None:
        """Take a beat."""

    def check(self, keys: list[str]) -> bool:
        """Every rank has been heard of."""
        return True

    def get(self, key: str) -> bytes:
        """Return one more beat of rank 1."""
        self._num_answers += 1
        if self._num_answers > 5:
            self._end()
        return to_json(Beat(self._num_answers, RankState.RUNNING, "", "far", 7, 1 << 30, 3, 0, ())).encode()


def broken() -> None:
    """End as a store whose host was killed."""
    raise RuntimeError("Broken pipe\nframe #0")


@pytest.mark.parametrize(
    ("end", "reason"), [(broken, "(Broken pipe)"), (threading.Event().wait, "(silent for ")], ids=["ended", "hangs"]
)
def test_a_store_that_answers_no_more_is_an_error_and_no_rank_is_called_dead(end: Callable[[], None], reason: str) -> None:
    """Also where the call into the store never comes back; what was last known of the ranks is said (C131)."""
    verdict: list[CommError] = []
    told = threading.Event()

    def on_verdict(error: CommError) -> None:
        verdict.append(error)
        told.set()

    watch = Watch(
        rank=0,
        size=2,
        store=FailingStore(end),
        order=Order(),
        pace=Pace(beat_seconds=0.02, dead_seconds=0.4),
        resident_bytes=lambda: 0,
        on_verdict=on_verdict,
    )
    watch.start()
    assert told.wait(30)
    watch.end(RankState.FAILED, "over")
    assert "rendezvous store does not answer rank 0" in verdict[0].message
    assert reason in verdict[0].message
    assert "rank 1: process 7 on far, in step 3, 1.00 GiB resident" in verdict[0].message
    assert len(verdict) == 1
