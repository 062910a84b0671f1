"""What `bench nvme` measures: options in, the matrix of jobs out; pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product
from pathlib import Path

from infinity.aio.select import KINDS
from infinity.byte_sizes import GIB, KIB, MIB, PAGE_BYTES, format_bytes, round_up
from infinity.errors import ConfigError

ENGINES = tuple(kind for kind in KINDS if kind != "auto")
NUM_REPETITIONS = 5

# Training moves whole tiles, which the engine cuts into blocks.
_TILE_BYTES = 8 * MIB
_NUM_BATCHES = 4  # under way at once
# Below it the number of operations is the limit, so blocks go to random places, a batch of them in one call.
RANDOM_BELOW_BYTES = 64 * KIB
_MAX_BLOCK_BYTES = GIB
_MAX_QUEUE_DEPTH = 4096


class Traffic(Enum):
    """What a job moves; MIXED is reads and writes in turn."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Job:
    """One cell of the matrix: `queue_depth` blocks of `block_bytes` in flight."""

    traffic: Traffic
    block_bytes: int
    queue_depth: int

    @property
    def is_random(self) -> bool:
        return self.block_bytes < RANDOM_BELOW_BYTES

    def __str__(self) -> str:
        return f"{self.traffic.value}, {format_bytes(self.block_bytes)} x {self.queue_depth}"


# Fills files, and writes without a pause; the configuration's default block and depth.
WRITING_JOB = Job(Traffic.WRITE, MIB, 32)


@dataclass(frozen=True, slots=True)
class Batches:
    """How the requests of a job come to the engine: `num_batches` are out at a time, each handed over in one call."""

    num_batches: int
    requests_per_batch: int
    request_bytes: int

    @property
    def batch_bytes(self) -> int:
        return self.requests_per_batch * self.request_bytes

    @property
    def num_bytes(self) -> int:
        """The memory that the batches take."""
        return self.num_batches * self.batch_bytes


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """What the user asked for; `size_bytes` is of the file in each directory, None: what fits up to `wanted_bytes`."""

    directories: tuple[Path, ...]
    size_bytes: int | None = None
    wanted_bytes: int = 4 * GIB
    engine: str = "auto"  # one of KINDS, or "all"
    traffics: tuple[Traffic, ...] = tuple(Traffic)
    block_bytes: tuple[int, ...] = (4 * KIB, MIB, 4 * MIB)
    queue_depths: tuple[int, ...] = (16, 32)
    seconds: float = 1.25  # timed, of each job
    long_run_seconds: float = 6.0  # of writing without a pause; 0: none
    with_fio: bool = False


def jobs_of(settings: NvmeSettings) -> tuple[Job, ...]:
    """Return the matrix. Raises ConfigError for a value that no engine takes."""
    if settings.engine not in (*KINDS, "all"):
        raise ConfigError(f"--engine: {settings.engine!r} is not known.", remedy=f"Known: {', '.join(KINDS)}, all.")
    for num_bytes in settings.block_bytes:
        if num_bytes % PAGE_BYTES or not 0 < num_bytes <= _MAX_BLOCK_BYTES:
            raise ConfigError(
                f"--block-size: {num_bytes} bytes is not a multiple of {PAGE_BYTES} up to 1 GiB.",
                remedy="Write for example 4KiB, 1MiB or 8MiB.",
            )
    for depth in settings.queue_depths:
        if not 0 < depth <= _MAX_QUEUE_DEPTH:
            raise ConfigError(f"--queue-depth: {depth} is not in 1 to {_MAX_QUEUE_DEPTH}.", remedy="Give for example 32.")
    for option, value, least in (("--seconds", settings.seconds, 0.05), ("--long-run", settings.long_run_seconds, 0.0)):
        if not least <= value < float("inf"):
            raise ConfigError(
                f"{option}: {value} is not a number of seconds from {least:g} on.", remedy="Give for example 2."
            )
    if settings.size_bytes is not None and settings.size_bytes % PAGE_BYTES:
        raise ConfigError(
            f"--size: {settings.size_bytes} is not a multiple of {PAGE_BYTES}.", remedy="Give for example 4GiB."
        )
    cells = product(settings.traffics, dict.fromkeys(settings.block_bytes), dict.fromkeys(settings.queue_depths))
    return tuple(Job(*cell) for cell in cells)


def batches_of(job: Job) -> Batches:
    """Return how a job's requests come to the engine: always more blocks than it keeps in flight, so that it never waits."""
    if job.is_random:
        return Batches(num_batches=_NUM_BATCHES, requests_per_batch=job.queue_depth, request_bytes=job.block_bytes)
    request_bytes = round_up(_TILE_BYTES, job.block_bytes)
    num_requests = max(2, -(-2 * job.queue_depth * job.block_bytes // request_bytes))
    # A quarter of them is waited for at once: a thread that sleeps and wakes costs more than what it submits.
    requests_per_batch = -(-num_requests // _NUM_BATCHES)
    return Batches(-(-num_requests // requests_per_batch), requests_per_batch, request_bytes)


def single_blocks_of(job: Job) -> Batches:
    """Return how they come with one block a request, in memory no larger than that of `batches_of`."""
    return batches_of(job) if job.is_random else Batches(2 * job.queue_depth, 1, job.block_bytes)
