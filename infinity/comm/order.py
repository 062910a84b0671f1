"""The order of a rank's collectives: what each was, as a chain of digests, so that two ranks can compare theirs. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 8
# Far more than one rank can be ahead of another: a rank compares what others publish with all of this.
_NUM_KEPT = 4096
# So many of the last collectives each side is quoted with when two orders differ.
_NUM_QUOTED = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective: its number from 0, the step it belongs to, what it was, and a digest of it and all before it."""

    number: int
    step: int
    what: str
    digest: str  # hexadecimal

    def __str__(self) -> str:
        return f"{self.what} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective in which two ranks are seen to differ, each with what came just before it there."""

    ours: tuple[Entry, ...]  # ends with the one that differs
    theirs: tuple[Entry, ...]

    @property
    def number(self) -> int:
        return self.ours[-1].number


class Order:
    """What this rank has asked for so far. One thread adds; any thread may look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=_NUM_KEPT)
        self._length = 0
        self._digest = b""
        self._step = 0

    @property
    def step(self) -> int:
        return self._step

    @property
    def length(self) -> int:
        """How many collectives were asked for so far."""
        return self._length

    def begin_step(self, step: int) -> None:
        """What is added from now on belongs to `step`."""
        self._step = step

    def add(self, what: str) -> Entry:
        """Append one collective and return its entry."""
        with self._lock:
            self._digest = blake2b(self._digest + f"{self._step} {what}".encode(), digest_size=DIGEST_BYTES).digest()
            entry = Entry(self._length, self._step, what, self._digest.hex())
            self._entries.append(entry)
            self._length += 1
        return entry

    def tail(self, num_entries: int) -> tuple[Entry, ...]:
        """Return the last `num_entries` collectives, the oldest first."""
        with self._lock:
            return tuple(self._entries)[-num_entries:]

    def first_difference(self, theirs: Sequence[Entry]) -> Difference | None:
        """Return where another rank's collectives, in ascending order, first differ from this rank's, or None.

        Numbers that only one of the two has say nothing: one rank may be ahead.
        """
        ours = self.tail(_NUM_KEPT)
        digests = {entry.number: entry.digest for entry in ours}
        for entry in theirs:
            if digests.get(entry.number, entry.digest) != entry.digest:
                return Difference(_until(ours, entry.number), _until(theirs, entry.number))
        return None


def quoted(entries: Sequence[Entry]) -> str:
    """Return collectives as words, in their order."""
    return ", then ".join(str(entry) for entry in entries) or "nothing"


def _until(entries: Iterable[Entry], number: int) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if number - _NUM_QUOTED < entry.number <= number)
