"""How the ranks of a job ended, and what that says of the job: the first cause, memory, and an exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.byte_sizes import MIB, format_bytes
from infinity.errors import CommError
from infinity.launch.error_file import RecordedError
from infinity.memory.oom import OomSign, OomVerdict
from infinity.memory.processes import ProcessMemory

# What Python and torch hold in each rank, beside what --cpu-memory counts; and the share of the rest that a budget may take.
_BASE_BYTES = 300 * MIB
_SHARE = 0.9

# A rank that a signal stopped in its own time ends with 128 + the signal's number, as shells report it.
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
_BROKEN_PIPE = 128 + signal.SIGPIPE  # whoever read a rank's output has enough: no failure that anybody has to hear of
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
    lacks_memory: bool = False  # whether a rank was killed that may have taken too much host memory


def outcome_of(ends: Sequence[End], asked: signal.Signals | None) -> Outcome:
    """Return how the job of these ranks ended; `asked` is the first signal that the launcher passed on.

    The cause is the earliest end by a signal or by an error of the rank's own. A rank that only could not go on without
    the others comes after that.
    """
    failed = [end for end in ends if end.has_failed and not end.by_launcher]
    own = [end for end in failed if end.exit_code not in (CommError.exit_code, -(asked or 0))]
    # A rank that has just begun dies of the signal itself, and ranks that stop look lost to each other.
    if asked is not None and not own:
        return Outcome(128 + asked)
    if not failed:
        return Outcome(next((end.exit_code for end in ends if end.was_stopped), 0))
    cause = min(own or failed, key=lambda end: end.at_seconds)
    if cause.exit_code == _BROKEN_PIPE:
        return Outcome(cause.exit_code)
    message, remedy = _death(cause, ends) if cause.exit_code < 0 else _failure(cause)
    words = [message, _memory_words(ends), _late_words(ends)]
    return Outcome(
        exit_code=cause.exit_code if cause.exit_code > 0 else CommError.exit_code,
        message=" ".join(filter(None, words)),
        remedy=remedy,
        lacks_memory=_lacks_memory(cause),
    )


def _lacks_memory(end: End) -> bool:
    return end.exit_code == -signal.SIGKILL and end.oom.sign is not OomSign.NOT_KILLED


def _failure(end: End) -> tuple[str, str]:
    if end.error is None:
        return f"Rank {end.rank} ended with exit code {end.exit_code}.", "What it said stands above."
    return f"Rank {end.rank} failed: {end.error.message}", end.error.remedy


def _death(end: End, ends: Sequence[End]) -> tuple[str, str]:
    number = -end.exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        name = f"signal {number}"
    killed = f"Rank {end.rank} was killed by {name}"
    if _lacks_memory(end):
        return f"{killed}, probably for lack of host memory: {_oom_words(end.oom)}.", _less_memory(end, ends)
    if number == signal.SIGKILL:
        return (
            f"{killed}: the kernel has killed nothing for lack of memory here meanwhile, so somebody sent the signal.",
            "Look for who did: a batch system's limit of time or memory, systemd-oomd, another user.",
        )
    is_crash = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
    return f"{killed}.", _ON_NATIVE_CRASH if is_crash else "Look for who sent the signal."


def _oom_words(verdict: OomVerdict) -> str:
    if verdict.sign is OomSign.UNKNOWN:
        return "the kernel's log (dmesg) says whether"
    if verdict.limit_bytes is None:
        return "the kernel has killed because the machine's memory was used up"
    return f"the kernel has killed because the limit of its control group, {format_bytes(verdict.limit_bytes)}, was reached"


def _less_memory(end: End, ends: Sequence[End]) -> str:
    """Say the --cpu-memory with which the ranks would have stayed below what they had when one was killed."""
    others = "A smaller --micro-batch-size or --seq-len and fewer ranks need less, too."
    held = [one.memory.resident_bytes for one in ends if one.memory is not None]
    if end.memory is None or len(held) < len(ends):
        return f"Give a smaller --cpu-memory: it is the machine's, and its ranks share it. {others}"
    limit_bytes = sum(held) if end.oom.limit_bytes is None else end.oom.limit_bytes
    is_shared = sum(held) <= limit_bytes + _BASE_BYTES * len(ends)  # by all ranks; each counts torch's code as its own
    share_bytes = (limit_bytes // len(ends) if is_shared else limit_bytes) - _BASE_BYTES
    if share_bytes < MIB:
        return f"That is too little for {len(ends)} ranks: raise the limit. {others}"
    budget_mib = int(share_bytes * _SHARE) * len(ends) // MIB
    return f"--cpu-memory {budget_mib}MiB would stay below that: it is the machine's, and its ranks share it. {others}"


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
