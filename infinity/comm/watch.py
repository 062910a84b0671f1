"""The watch over the other ranks: every rank says where it is in the rendezvous store, and reads what the others say.

It asks the store, never the collective that is stuck. What it finds is one CommError: ranks that ask for different
collectives, a rank that died, one that failed, one that ended while this one goes on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from infinity.comm.beats import Beat, RankState, from_json, to_json
from infinity.comm.busy import is_running
from infinity.comm.order import Difference, Order, quoted
from infinity.errors import CommError

# Enough for any two ranks: they are apart by the collectives that one has asked for ahead.
_NUM_PUBLISHED = 128
# A rank whose connection broke is dead when it says nothing for so many beats; without that sign `Pace.dead_seconds` pass.
_NUM_BEATS_OF_A_SUSPECT = 4
# How often the store is asked when a collective has failed and only the reason is looked for.
_URGENT_SECONDS = 0.05

_SAME_ORDER = (
    "Every rank must visit the same units in the same order and have equally many steps: look for branches in forward that "
    "depend on a rank's data, and for data that ends earlier on one rank."
)
_LOOK_AT_RANK = "Look at the output of that rank; the kernel's log (dmesg) says whether it was killed for lack of memory."


class BeatStore(Protocol):
    """What the watch needs of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a rank says where it is, and after how long a silence it counts as dead."""

    beat_seconds: float = 0.5
    dead_seconds: float = 8.0


@dataclass(slots=True)
class _Peer:
    beat: Beat | None
    heard_at: float  # by this rank's clock: clocks of several machines are never compared
    suspected: bool = False


class Watch:
    """Two threads of a rank: one publishes and reads beats, one judges, also when the store hangs. Its opener ends it.

    `store` must be the watch's own connection: a call that waits on a connection keeps every other call on it waiting.
    `on_verdict` is called once, from the judge's thread. After a verdict this rank is FAILED for the others.
    """

    def __init__(
        self, *, rank: int, size: int, store: BeatStore, order: Order, pace: Pace, resident_bytes: Callable[[], int],
        on_verdict: Callable[[CommError], None],
    ) -> None:  # fmt: skip
        self._rank = rank
        self._store = store
        self._order = order
        self._pace = pace
        self._resident_bytes = resident_bytes
        self._on_verdict = on_verdict
        self._host = socket.gethostname()
        self._num_beats = 0
        self._looked_at = time.monotonic()  # when the store last told everything
        self._peers = {peer: _Peer(None, self._looked_at) for peer in range(size) if peer != rank}
        self._store_error: RuntimeError | None = None
        self._last_words: tuple[RankState, str] | None = None
        self._ending = False
        self._urgent = False
        self._wake = threading.Event()  # set once: by what makes the next look urgent, or the end
        self._looked = threading.Event()
        self._verdict: CommError | None = None
        self._judged = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="comm-beats", daemon=True)
        self._judge = threading.Thread(target=self._judge_beats, name="comm-judge", daemon=True)

    def start(self) -> None:
        """Start the threads (called once, by who opens the group)."""
        self._beats.start()
        self._judge.start()

    def explain(self, error: BaseException, peer: int | None = None) -> CommError:
        """Return why a collective failed with `error`, as the beats tell it; blocks until they do, a few seconds at most.

        `peer` is the rank whose connection broke, where one did.
        """
        if peer is not None:
            self._peers[peer].suspected = True
        self._urgent = True
        self._wake.set()
        if not self._ending:
            self._judged.wait(self._pace.dead_seconds + 2 * self._pace.beat_seconds)
        return self._verdict or CommError(
            f"A collective of rank {self._rank} failed in step {self._order.step}: {error}.",
            remedy="The other ranks are alive and agree on the order, so look at the network between them.",
        )

    def end(self, state: RankState, why: str = "") -> None:
        """Publish how this rank ended and stop; waits for a store that hangs no longer than for a beat of a dead rank."""
        if self._ending:
            return
        self._last_words = self._last_words or (state, why)
        self._ending = True
        self._wake.set()
        self._looked.set()
        self._beats.join(self._pace.beat_seconds * _NUM_BEATS_OF_A_SUSPECT)

    def _beat(self) -> None:
        try:
            while not self._ending and self._verdict is None:
                self._publish(RankState.RUNNING, "")
                for rank, peer in self._peers.items():
                    self._read(rank, peer)
                self._looked_at = time.monotonic()
                self._looked.set()
                if self._urgent:
                    time.sleep(_URGENT_SECONDS)
                else:
                    self._wake.wait(self._pace.beat_seconds)
            if self._last_words is not None:
                self._publish(*self._last_words)
        except RuntimeError as error:  # what torch's stores raise
            self._store_error = error
            self._looked.set()

    def _judge_beats(self) -> None:
        while not self._ending:
            self._looked.wait(self._pace.beat_seconds)
            self._looked.clear()
            error = self._find()
            if error is not None and not self._ending:
                self._last_words = (RankState.FAILED, error.message)
                self._verdict = error
                self._urgent = True
                self._wake.set()
                self._judged.set()
                self._on_verdict(error)
                return

    def _publish(self, state: RankState, why: str) -> None:
        tail = self._order.tail(_NUM_PUBLISHED)
        beat = Beat(
            number=self._num_beats,
            state=state,
            why=why,
            host=self._host,
            process_id=os.getpid(),
            resident_bytes=self._resident_bytes(),
            step=self._order.step,
            length=tail[-1].number + 1 if tail else 0,
            tail=tail,
        )
        self._num_beats += 1
        self._store.set(str(self._rank), to_json(beat))

    def _read(self, rank: int, peer: _Peer) -> None:
        key = str(rank)
        if not self._store.check([key]):
            return
        beat = from_json(self._store.get(key))
        if peer.beat is None or beat.number != peer.beat.number:
            peer.beat, peer.heard_at = beat, time.monotonic()

    def _find(self) -> CommError | None:
        """The reason nearest to the cause comes first: a rank fails because another died, and not the other way round."""
        for rank, peer in self._peers.items():
            difference = None if peer.beat is None else self._order.first_difference(peer.beat.tail)
            if difference is not None:
                return self._different(rank, difference)
        for judge in (self._dead, self._failed, self._ended):
            for rank, peer in self._peers.items():
                error = judge(rank, peer)
                if error is not None:
                    return error
        return self._store_gone()

    def _different(self, rank: int, difference: Difference) -> CommError:
        ours, theirs = difference.ours[-1], difference.theirs[-1]
        return CommError(
            f"Rank {self._rank} in step {ours.step} and rank {rank} in step {theirs.step} ask for different collectives, "
            f"from number {difference.number} on: rank {self._rank} for {quoted(difference.ours)}; "
            f"rank {rank} for {quoted(difference.theirs)}.",
            remedy=_SAME_ORDER,
        )

    def _dead(self, rank: int, peer: _Peer) -> CommError | None:
        if peer.beat is not None and peer.beat.state is not RankState.RUNNING:
            return None
        silent_seconds = self._looked_at - peer.heard_at  # while the store itself is silent, no rank can be heard
        suspect_seconds = self._pace.beat_seconds * _NUM_BEATS_OF_A_SUSPECT
        if silent_seconds <= (min(suspect_seconds, self._pace.dead_seconds) if peer.suspected else self._pace.dead_seconds):
            return None
        if not peer.suspected and self._is_busy(peer.beat):
            return None
        last = "It never said anything." if peer.beat is None else f"Last known: {peer.beat.words()}."
        return CommError(
            f"Rank {rank} is dead: rank {self._rank} has not heard of it for {silent_seconds:.1f} s. {last}",
            remedy=_LOOK_AT_RANK,
        )

    def _is_busy(self, beat: Beat | None) -> bool:
        """Whether a silent rank of this machine only computes: Python's lock may hold up the thread of its beats."""
        if beat is None or beat.host != self._host or beat.process_id == os.getpid():
            return False
        return is_running(beat.process_id)

    def _failed(self, rank: int, peer: _Peer) -> CommError | None:
        if peer.beat is None or peer.beat.state is not RankState.FAILED:
            return None
        return CommError(
            f"Rank {rank} failed: {peer.beat.why} Last known: {peer.beat.words()}.", remedy="The cause is there."
        )

    def _ended(self, rank: int, peer: _Peer) -> CommError | None:
        beat = peer.beat
        if beat is None or beat.state is not RankState.CLOSED or beat.length >= self._order.length:
            return None
        missing = self._order.tail(self._order.length - beat.length)
        return CommError(
            f"Rank {rank} ended in step {beat.step} after {beat.length} collectives, and rank {self._rank} in step "
            f"{self._order.step} asks for more: {quoted(missing[:3])}.",
            remedy=_SAME_ORDER,
        )

    def _store_gone(self) -> CommError | None:
        silent_seconds = time.monotonic() - self._looked_at
        if self._store_error is None and silent_seconds <= self._pace.dead_seconds:
            return None
        reason = (
            f"silent for {silent_seconds:.1f} s" if self._store_error is None else str(self._store_error).splitlines()[0]
        )
        known = "; ".join(f"rank {rank}: {peer.beat.words()}" for rank, peer in self._peers.items() if peer.beat is not None)
        return CommError(
            f"The rendezvous store does not answer rank {self._rank} any more ({reason}): its host, rank 0 or the "
            f"launcher, has ended or hangs. Last known: {known or 'nothing'}.",
            remedy=_LOOK_AT_RANK,
        )
