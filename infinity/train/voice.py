"""Who speaks: rank 0 shows what is said; what other ranks have to say is shown there once, with their rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.train.reporter import Progress, Reporter, Row, StepRecord


class Silent:
    """A reporter that shows nothing: of the ranks that do not speak."""

    def note(self, text: str) -> None: ...
    def plan(self, rows: Sequence[Row]) -> None: ...
    def phase(self, text: str) -> None: ...
    def step(self, record: StepRecord, progress: Progress) -> None: ...
    def summary(self, rows: Sequence[Row]) -> None: ...


class Voice:
    """A reporter that remembers which notes were said; what the ranks say alike is so shown once.

    `said` are the notes that the reporter was told before.
    """

    def __init__(self, reporter: Reporter, said: Iterable[str] = ()) -> None:
        self._said = dict.fromkeys(said)
        self._untold = list(self._said)
        self.plan = reporter.plan
        self.phase = reporter.phase
        self.step = reporter.step
        self.summary = reporter.summary
        self._show = reporter.note

    def note(self, text: str) -> None:
        self._said[text] = None
        self._untold.append(text)
        self._show(text)

    def take_untold(self) -> list[str]:
        """Return the notes since the last call: what other ranks do not know of."""
        untold, self._untold = self._untold, []
        return untold

    def repeat(self, rank: int, notes: Iterable[str]) -> None:
        """Show the notes of another rank, but those that were said here."""
        for text in notes:
            if text not in self._said:
                self._said[text] = None
                self._show(f"Rank {rank}: {text}")
