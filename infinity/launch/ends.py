"""How the ranks of a job ended, and what that says of the job: the first cause, memory, and an exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.byte_sizes import format_bytes
from infinity.errors import CommError
from infinity.launch.error_file import RecordedError
from infinity.memory.oom import OomSign, OomVerdict
from infinity.memory.processes import ProcessMemory

# A rank that a signal stopped in its own time ends with 128 + the signal's number, as shells report it.
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
_LESS_MEMORY = (
    "What needs less: a smaller --cpu-memory, which is the machine's and shared by its ranks; a smaller --micro-batch-size "
    "or --seq-len; fewer ranks."
)
_ON_NATIVE_CRASH = "Native code crashed: run `infinity doctor`, and please report it with what the rank said above."


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended."""

    rank: int
    exit_code: int  # negative: the number of the signal that killed it
    at_seconds: float  # by the launcher's clock
    by_launcher: bool  # whether the launcher killed it, because of another rank's end
    error: RecordedError | None  # what it left in its error file
    memory: ProcessMemory | None  # when it was last seen alive; None for one that ended before
    oom: OomVerdict

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped it in its own time."""
        return self.exit_code in _STOPPED

    @property
    def has_failed(self) -> bool:
        """Whether the job cannot go on because of it."""
        return self.exit_code != 0 and not self.was_stopped


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: its exit code, and what there is to say that no rank has said."""

    exit_code: int
    message: str = ""
    remedy: str = ""


def outcome_of(ends: Sequence[End], asked: signal.Signals | None) -> Outcome:
    """Return how the job of these ranks ended; `asked` is the first signal that the launcher passed on.

    The cause is the earliest end by a signal or by an error of the rank's own. A rank that only could not go on without
    the others comes after that.
    """
    failed = [end for end in ends if end.has_failed and not end.by_launcher]
    own = [end for end in failed if end.exit_code not in (CommError.exit_code, -(asked or 0))]
    if (
        asked is not None and not own
    ):  # a rank that has just begun dies of the signal; ranks that stop look lost to each other
        return Outcome(128 + asked)
    if not failed:
        return Outcome(next((end.exit_code for end in ends if end.was_stopped), 0))
    cause = min(own or failed, key=lambda end: end.at_seconds)
    message, remedy = _death(cause) if cause.exit_code < 0 else _failure(cause)
    words = [message, _memory_words(ends), _late_words(ends)]
    return Outcome(
        exit_code=cause.exit_code if cause.exit_code > 0 else CommError.exit_code,
        message=" ".join(filter(None, words)),
        remedy=remedy,
    )


def _failure(end: End) -> tuple[str, str]:
    if end.error is None:
        return f"Rank {end.rank} ended with exit code {end.exit_code}.", "What it said stands above."
    return f"Rank {end.rank} failed: {end.error.message}", end.error.remedy


def _death(end: End) -> tuple[str, str]:
    number = -end.exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        name = f"signal {number}"
    if number != signal.SIGKILL:
        is_crash = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
        return f"Rank {end.rank} was killed by {name}.", _ON_NATIVE_CRASH if is_crash else "Look for who sent the signal."
    why, remedy = {
        OomSign.KILLED: (_out_of_memory(end.oom), _LESS_MEMORY),
        OomSign.NOT_KILLED: (
            "the kernel has killed nothing for lack of memory here meanwhile, so somebody sent the signal",
            "Look for who did: a batch system's limit of time or memory, systemd-oomd, another user.",
        ),
        OomSign.UNKNOWN: ("probably for lack of host memory; the kernel's log (dmesg) says whether", _LESS_MEMORY),
    }[end.oom.sign]
    return f"Rank {end.rank} was killed by {name}, {why}.", remedy


def _out_of_memory(verdict: OomVerdict) -> str:
    limit = "" if verdict.limit_bytes is None else f" of {format_bytes(verdict.limit_bytes)}"
    where = f"its control group's limit{limit}" if limit else "the machine's memory"
    return f"probably for lack of host memory: the kernel has killed because {where} was reached"


def _memory_words(ends: Sequence[End]) -> str:
    known = [
        f"rank {end.rank} {format_bytes(end.memory.resident_bytes)} (at most {format_bytes(end.memory.peak_bytes)})"
        for end in ends
        if end.memory is not None
    ]
    return f"Last known memory: {', '.join(known)}." if known else ""


def _late_words(ends: Sequence[End]) -> str:
    late = [str(end.rank) for end in ends if end.by_launcher]
    if not late:
        return ""
    return f"{'Rank' if len(late) == 1 else 'Ranks'} {', '.join(late)} did not end without it and had to be killed."
