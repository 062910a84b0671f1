"""What a check says, and all of them together: states, findings, the report and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from infinity.errors import PlatformError


class State(str, Enum):
    """How a check ended. Training cannot run with a part that is missing or fails."""

    OK = "ok"  # as it should be
    NOTE = "note"  # training runs, but slower than it could, or something about it should be known
    MISSING = "missing"  # a part that training needs is not there
    FAILS = "fails"  # a part is there and does not work, or a limit is too low


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check says of one thing."""

    state: State
    found: str
    needed: str
    remedy: str = ""
    exit_code: int = 0  # that training would end with, of infinity.errors; 0 where it can run


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with the name of its check and, where it is about a directory, that directory."""

    name: str
    subject: str  # a directory; "" where the check is about the machine
    verdict: Verdict

    def as_json(self) -> dict[str, object]:
        """Return what `infinity doctor --json` prints of a check."""
        return {"name": self.name, "subject": self.subject, **asdict(self.verdict)}


@dataclass(frozen=True, slots=True)
class Report:
    """Every finding, in the order of the checks."""

    findings: Sequence[Finding]

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """The findings that keep training from running."""
        return tuple(finding for finding in self.findings if finding.verdict.exit_code)

    @property
    def exit_code(self) -> int:
        """0 where training can run, otherwise the code of the first obstacle."""
        return next((finding.verdict.exit_code for finding in self.obstacles), 0)

    def as_json(self) -> dict[str, object]:
        """Return what `infinity doctor --json` prints."""
        return {
            "can_train": not self.obstacles,
            "exit_code": self.exit_code,
            "checks": [finding.as_json() for finding in self.findings],
        }


def ok(found: str, *, needed: str) -> Verdict:
    """Return the verdict that all is well."""
    return Verdict(State.OK, found, needed)


def note(found: str, *, needed: str, remedy: str) -> Verdict:
    """Return the verdict that training runs, and that something could be better."""
    return Verdict(State.NOTE, found, needed, remedy)


def missing(found: str, *, needed: str, remedy: str, exit_code: int = PlatformError.exit_code) -> Verdict:
    """Return the verdict that a part which training needs is not there."""
    return Verdict(State.MISSING, found, needed, remedy, exit_code)


def fails(found: str, *, needed: str, remedy: str, exit_code: int = PlatformError.exit_code) -> Verdict:
    """Return the verdict that a part is there and does not work."""
    return Verdict(State.FAILS, found, needed, remedy, exit_code)
