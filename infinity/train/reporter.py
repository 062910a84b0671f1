"""What the training loop tells whoever shows it; no terminal, no torch. `cli` renders it, tests record it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl, in its order; there, a loss or norm that is not finite is null.

    Loss, norm and tokens are those of all ranks; bytes and memory are rank 0's.
    """

    step: int  # optimizer steps asked for so far, from 1; a skipped one counts
    loss: float  # nats per token, mean over the step's micro-batches
    grad_norm: float | None  # before clipping; None where the engine did not need it
    lr: float
    tokens: int  # of this step
    step_seconds: float
    tokens_per_second: float
    nvme_read_bytes: int
    nvme_write_bytes: int
    unit_loads: int
    cpu_memory_peak_bytes: int  # the ledger's, since the start
    rss_peak_bytes: int  # the process's, since the start
    skipped: bool
    loss_scale: float  # of this step; 1 but in fp16
    all_gather_bytes: int  # between ranks: as many come to this rank as go out
    reduce_scatter_bytes: int
    broadcast_bytes: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a live line shows beside the step's own record."""

    num_steps: int
    seconds_left: float
    cpu_memory_bytes: int  # in use now, by the ledger
    cpu_memory_budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a name and its value in words."""

    name: str
    value: str


class Reporter(Protocol):
    """Called from the training thread only, except `note`, which a signal handler may call too."""

    def note(self, text: str) -> None:
        """Say one sentence: something that was not available, was chosen, or happened."""
        ...

    def plan(self, rows: Sequence[Row]) -> None:
        """Show what is going to happen, before anything heavy starts."""
        ...

    def phase(self, text: str) -> None:
        """Say what takes the next seconds, such as the initialisation."""
        ...

    def step(self, record: StepRecord, progress: Progress) -> None:
        """Show a finished step."""
        ...

    def summary(self, rows: Sequence[Row]) -> None:
        """Show what the run came to."""
        ...
