"""What a run came to: totals, peaks and where things lived, as summary.json and as rows to show."""

from __future__ import annotations

import math
import platform
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from infinity.byte_sizes import format_bytes
from infinity.train.reporter import Row, StepRecord

_RECENT_STEPS = 10
_REDUCTION_WORDS = {"boundary": "gradients reduced once a step", "micro_batch": "gradients reduced with every micro-batch"}


@dataclass(slots=True)
class Totals:
    """Sums over the steps of this process; `add` is called after each."""

    steps: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    unit_loads: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    broadcast_bytes: int = 0
    last_loss: float = math.nan
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    recent_bytes_between_ranks: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.skipped_steps += record.skipped
        self.tokens += record.tokens
        self.seconds += record.step_seconds
        self.nvme_read_bytes += record.nvme_read_bytes
        self.nvme_write_bytes += record.nvme_write_bytes
        self.unit_loads += record.unit_loads
        self.all_gather_bytes += record.all_gather_bytes
        self.reduce_scatter_bytes += record.reduce_scatter_bytes
        self.broadcast_bytes += record.broadcast_bytes
        self.last_loss = record.loss
        self.recent_losses.append(record.loss)
        self.recent_seconds.append(record.step_seconds)
        self.recent_bytes_between_ranks.append(
            record.all_gather_bytes + record.reduce_scatter_bytes + record.broadcast_bytes
        )

    @property
    def median_bytes_between_ranks(self) -> int:
        """What one of the last steps moved: the first, and one after a checkpoint or an evaluation, move more or less."""
        return statistics.median_low(self.recent_bytes_between_ranks) if self.recent_bytes_between_ranks else 0

    def seconds_left(self, num_steps: int) -> float:
        """Estimate the time of `num_steps` more steps from the recent ones."""
        return num_steps * sum(self.recent_seconds) / max(1, len(self.recent_seconds))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A mean loss over the evaluation batches after some step."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank has taken over the run; totals are those of this process."""

    rank: int
    host: str
    cpu_memory_peak_bytes: int  # booked
    rss_peak_bytes: int
    pss_peak_bytes: int  # the greatest seen between steps: pages that processes share count once among them; 0 on one rank
    nvme_read_bytes: int
    nvme_write_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of summary.json. Totals are those of this process, without the steps before a resume.

    Losses and tokens are those of all ranks; bytes, peaks and the placement are rank 0's, where `ranks` does not say more.
    """

    model: str
    parameters: int
    steps: int  # of the whole run
    steps_in_this_process: int
    skipped_steps: int
    final_loss: float  # of the last step, nats per byte
    mean_loss_of_last_steps: float  # over the last ten
    evaluations: tuple[Evaluation, ...]
    tokens: int
    seconds: float  # in steps
    tokens_per_second: float
    nvme_read_bytes: int
    nvme_write_bytes: int
    nvme_bytes_per_second: float  # read and written, over the time in steps, computing included
    nvme_predicted_bytes_per_second: float | None  # of the same mix at the measured rates; None where none were measured
    unit_loads: int
    all_gather_bytes: int  # of rank 0, in steps
    reduce_scatter_bytes: int
    broadcast_bytes: int
    median_bytes_between_ranks: int  # over the last ten steps
    predicted_bytes_between_ranks: int  # in each step
    stage: int
    gradient_reduction: str | None  # when gradients are summed over ranks; None on one
    cpu_memory_peak_bytes: int
    rss_peak_bytes: int
    num_ranks: int
    ranks: tuple[RankFacts, ...]
    placement: Mapping[str, object]
    engine: str  # of reads and writes; "none" without NVMe
    registered_files: bool  # with that engine
    registered_buffers: bool
    checksums: bool  # whether what was read from NVMe was compared with what was written
    precision: str
    resumed_from: str | None
    checkpoint: str | None  # the last one that was written
    weights: str | None
    stopped_by: str | None  # name of the signal
    exit_code: int
    versions: Mapping[str, str]

    def as_json(self) -> dict[str, object]:
        """Return the fields; a loss that is not finite is None."""
        return {name: _finite(value) for name, value in asdict(self).items()}

    def rows(self) -> tuple[Row, ...]:
        """Return the summary in words."""
        rows = [
            Row("Steps", f"{self.steps}" + (f", {self.skipped_steps} skipped" if self.skipped_steps else "")),
            *self._loss_rows(),
            *(
                Row("Evaluation", f"{entry.loss:.4f} nats per byte after step {entry.step}")
                for entry in self.evaluations[-1:]
            ),
            Row("Tokens", f"{self.tokens} in {self.seconds:.1f} s, {self.tokens_per_second:.0f} a second"),
            Row(
                "I/O",
                io_words(self.engine, registered_files=self.registered_files, registered_buffers=self.registered_buffers),
            ),
            Row("NVMe" if self.num_ranks == 1 else "NVMe of rank 0", self._nvme_words()),
            *self._link_rows(),
            *self._memory_rows(),
        ]
        if self.checkpoint:
            rows.append(Row("Checkpoint", self.checkpoint))
        if self.weights:
            rows.append(Row("Weights", self.weights))
        return tuple(rows)

    def _link_rows(self) -> tuple[Row, ...]:
        if self.num_ranks == 1:
            return ()
        when = _REDUCTION_WORDS[self.gradient_reduction] if self.gradient_reduction else ""
        moved, planned = format_bytes(self.median_bytes_between_ranks), format_bytes(self.predicted_bytes_between_ranks)
        said = f"{moved} in the median step (of {planned} planned), {when}"
        return (Row("Between ranks", f"stage {self.stage}: {said}"),)

    def _memory_rows(self) -> tuple[Row, ...]:
        booked, resident = self.cpu_memory_peak_bytes, self.rss_peak_bytes
        if self.num_ranks == 1:
            return (Row("Memory peak", f"{format_bytes(booked)} booked, {format_bytes(resident)} RSS"),)
        rows = [
            Row(
                f"Memory peak of rank {one.rank}",
                f"{format_bytes(one.cpu_memory_peak_bytes)} booked, {format_bytes(one.rss_peak_bytes)} RSS, "
                f"{format_bytes(one.pss_peak_bytes)} PSS on {one.host}",
            )
            for one in self.ranks
        ]
        together = sum(one.pss_peak_bytes for one in self.ranks)
        return (*rows, Row("Memory peak in all", f"{format_bytes(together)} PSS"))

    def _nvme_words(self) -> str:
        moved = f"{format_bytes(self.nvme_read_bytes)} read, {format_bytes(self.nvme_write_bytes)} written"
        if not self.nvme_bytes_per_second:
            return moved
        predicted = self.nvme_predicted_bytes_per_second
        beside = f" (of {format_bytes(predicted)}/s at the rates measured before)" if predicted else ""
        return f"{moved}, {format_bytes(self.nvme_bytes_per_second)}/s over the steps{beside}"

    def _loss_rows(self) -> tuple[Row, ...]:
        if not self.steps_in_this_process:
            return (Row("Final loss", "none: no step was taken"),)
        loss = f"{self.final_loss:.4f} nats per byte (mean of the last steps {self.mean_loss_of_last_steps:.4f})"
        return (Row("Final loss", loss),)


def io_words(engine: str, *, registered_files: bool, registered_buffers: bool) -> str:
    """Return what does the reads and writes, and what is registered with it."""
    registered = [name for name, holds in (("files", registered_files), ("buffers", registered_buffers)) if holds]
    return f"{engine}, {' and '.join(registered)} registered" if registered else engine


def versions(**of_parts: str) -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {**of_parts, "python": platform.python_version(), "system": platform.platform()}


def mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
