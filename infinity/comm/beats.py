"""A beat: what a rank says about itself in the rendezvous store, again and again. Knows no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum

from infinity.byte_sizes import format_bytes
from infinity.comm.order import Entry, quoted


class RankState(str, Enum):
    """RUNNING: more collectives may come. FAILED: an error ended it, `why`. CLOSED: it ended as it should."""

    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank at one moment. `number` grows with every beat; `tail` are its last collectives, the oldest first."""

    number: int
    state: RankState
    why: str
    host: str
    process_id: int
    resident_bytes: int
    step: int
    length: int
    tail: tuple[Entry, ...]

    def words(self) -> str:
        """Where the rank was and what it held: for the error that is about it."""
        return (
            f"process {self.process_id} on {self.host}, in step {self.step}, {format_bytes(self.resident_bytes)} resident, "
            f"last collective: {quoted(self.tail[-1:])}"
        )


def to_json(beat: Beat) -> str:
    """Return a beat as one line of JSON."""
    return json.dumps(asdict(beat))


def from_json(text: str | bytes) -> Beat:
    """Return the beat that `to_json` wrote."""
    values = json.loads(text)
    tail = tuple(Entry(**entry) for entry in values.pop("tail"))
    return Beat(**{**values, "state": RankState(values["state"]), "tail": tail})
