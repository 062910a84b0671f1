"""The ranks of one job together: what one rank's end, or a signal to the launcher, means for the others."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol

from infinity.launch.ends import End, Outcome, outcome_of
from infinity.states import Lifecycle

# How long ranks may go on after one has failed, or after a second signal. It is what the watch of a rank needs to find
# out why it cannot go on, and say so; the job ends within 10 seconds.
GRACE_SECONDS = 8.5


class JobState(Enum):
    """Where a job is."""

    WAITING = "waiting"  # no rank has been started
    RUNNING = "running"
    STOPPING = "stopping"  # a signal was passed on: the ranks end in their own time, however long a checkpoint takes
    ENDING = "ending"  # a rank has failed, or a second signal came: the others have until the deadline
    KILLED = "killed"  # whoever was left
    ENDED = "ended"


_MOVES = {
    JobState.WAITING: (JobState.RUNNING, JobState.ENDED),
    JobState.RUNNING: (JobState.STOPPING, JobState.ENDING, JobState.KILLED, JobState.ENDED),
    JobState.STOPPING: (JobState.ENDING, JobState.KILLED, JobState.ENDED),
    JobState.ENDING: (JobState.KILLED, JobState.ENDED),
    JobState.KILLED: (JobState.ENDED,),
    JobState.ENDED: (),
}


class Rank(Protocol):
    """What a job needs of a rank's process."""

    @property
    def end(self) -> End | None: ...
    def look(self, now_seconds: float) -> End | None: ...
    def send(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...


class Job:
    """Owned by the launcher's main thread; its signal handlers may call `note` at any moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks: list[Rank] = []
        self._clock = clock
        self._life = Lifecycle("job", JobState.WAITING, _MOVES)
        self._deadline_seconds = 0.0
        self._noted: deque[signal.Signals] = deque()
        self._asked: signal.Signals | None = None

    @property
    def state(self) -> JobState:
        return self._life.state

    def begin(self, starts: Iterable[Callable[[], Rank]]) -> None:
        """Start the ranks. Where one cannot be started those before it run, and `kill` ends them."""
        self._life.to(JobState.RUNNING)
        for start in starts:
            self._ranks.append(start())

    def note(self, number: signal.Signals) -> None:
        """Take a signal, which the next look passes on.

        The first lets the ranks stop in their own time, a second at once, one more kills them.
        """
        self._noted.append(number)

    def look(self) -> bool:
        """Look at every rank and do what is due; return whether all have ended. Called again and again."""
        now = self._clock()
        while self._noted:
            self._pass_on(self._noted.popleft(), now)
        ends = [rank.look(now) for rank in self._ranks]
        if None not in ends:
            if self.state is not JobState.ENDED:
                self._life.to(JobState.ENDED)
            return True
        if self.state in (JobState.RUNNING, JobState.STOPPING):
            if any(end is not None and end.has_failed for end in ends):
                self._end_by(now)
        elif self.state is JobState.ENDING and now >= self._deadline_seconds:
            self.kill()
        return False

    def kill(self) -> None:
        """Kill whoever is left."""
        if self.state in (JobState.RUNNING, JobState.STOPPING, JobState.ENDING):
            self._life.to(JobState.KILLED)
        for rank in self._ranks:
            rank.kill()

    def outcome(self) -> Outcome:
        """Return how the job ended; every rank has ended."""
        return outcome_of([rank.end for rank in self._ranks if rank.end is not None], self._asked)

    def _pass_on(self, number: signal.Signals, now_seconds: float) -> None:
        if self.state is JobState.RUNNING:
            self._asked = number
            self._life.to(JobState.STOPPING)
        elif self.state is JobState.STOPPING:
            self._end_by(now_seconds)
        else:
            self.kill()
            return
        for rank in self._ranks:
            rank.send(number)

    def _end_by(self, now_seconds: float) -> None:
        self._deadline_seconds = now_seconds + GRACE_SECONDS
        self._life.to(JobState.ENDING)
