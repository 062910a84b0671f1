"""What a step reports, and what moves its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The decision about one optimizer step."""

    grad_norm: float  # global L2 norm, unscaled, before clipping; not finite where a gradient was not
    clip_coefficient: float  # gradients were multiplied by it
    lr: float
    loss_scale: float  # losses were multiplied by it; 1 but in fp16
    skipped: bool  # a gradient was not finite: no state was touched
    first_not_finite: str | None = None  # the parameter where backward met that first
    losses: tuple[float, ...] = ()  # of every micro-batch of all ranks, where they are known
    loss: float = 0.0  # their weighted mean


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of `train_batch`. Bytes are those that moved while it ran: the update of the step before included.

    Those over NVMe and between ranks are this rank's; everything else is of all ranks.
    """

    step: int  # counted from 1
    loss: float  # weighted mean over the micro-batches of all ranks
    losses: tuple[float, ...]  # by rank
    grad_norm: float
    clip_coefficient: float
    lr: float
    loss_scale: float  # the loss was multiplied by it before backward; 1 but in fp16
    skipped: bool
    first_not_finite: str | None  # of a skipped step: the parameter where backward met a gradient that is not finite first
    unit_loads: int
    nvme_read_bytes: int
    nvme_write_bytes: int
    gradient_spill_bytes: int
    all_gather_bytes: int  # between ranks: as many come to this rank as go out
    reduce_scatter_bytes: int
    broadcast_bytes: int


@dataclass(frozen=True, slots=True)
class IoFacts:
    """What does the reads and writes of an engine, as it was opened."""

    engine: str  # "uring", "threads" or "buffered"
    registered_files: bool  # whether it knows every swap file beforehand
    registered_buffers: bool  # and every buffer that a step's I/O goes through


def step_result(step: int, update: UpdateResult, counters: Mapping[str, int]) -> StepResult:
    """Return the report of a step; `counters` are those that the recorder has counted while it ran."""
    return StepResult(
        step=step,
        loss=update.loss,
        losses=update.losses,
        grad_norm=update.grad_norm,
        clip_coefficient=update.clip_coefficient,
        lr=update.lr,
        loss_scale=update.loss_scale,
        skipped=update.skipped,
        first_not_finite=update.first_not_finite,
        unit_loads=counters.get("unit_loads", 0),
        nvme_read_bytes=counters.get("nvme_read_bytes", 0),
        nvme_write_bytes=counters.get("nvme_write_bytes", 0),
        gradient_spill_bytes=counters.get("gradient_spill_bytes", 0),
        all_gather_bytes=counters.get("all_gather_bytes", 0),
        reduce_scatter_bytes=counters.get("reduce_scatter_bytes", 0),
        broadcast_bytes=counters.get("broadcast_bytes", 0),
    )
