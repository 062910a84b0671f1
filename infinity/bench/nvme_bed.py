"""What a measurement stands on: a file in a run directory that was written once, buffers, an engine.

The file is made as training makes its swap files. No other file is written to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from infinity.aio.engine import Engine, EngineFacts, MemoryRange
from infinity.aio.select import open_engine
from infinity.bench.nvme_jobs import WRITING_JOB, Job, batches_of
from infinity.bench.nvme_places import Places
from infinity.bench.nvme_stream import Stream, Target
from infinity.byte_sizes import format_bytes
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.limits import host_limit_bytes
from infinity.states import Tier
from infinity.store.directory import SWAP_NAME
from infinity.store.swap_file import create_swap_file

_OWNER = "bench nvme"
_TOLD_EVERY_SECONDS = 0.5


def open_targets(
    places: Places, jobs: Sequence[Job], *, write_seconds: float | None, tell: Callable[[str], None], resources: ExitStack
) -> tuple[list[Target], int]:
    """Make and fill a file in every directory, and buffers of random bytes; return them, and the bytes written.

    `write_seconds`: when writing a file takes longer, it is used as far as it was written. `tell` is told of the progress.
    `resources` takes everything away again. Raises StorageError, SwapSpaceError, OverBudget.
    """
    memory_bytes = max(batches_of(job).num_bytes for job in (*jobs, WRITING_JOB))
    ledger = Ledger({Tier.CPU: host_limit_bytes().num_bytes})
    targets, written_bytes = [], 0
    for run_path in places.run_paths:
        file = create_swap_file(run_path / SWAP_NAME, places.size_bytes)
        resources.callback(file.close)
        arena = open_arena(memory_bytes, ledger=ledger, tier=Tier.CPU, owner=_OWNER, pin=False)
        resources.callback(arena.close)
        fill_randomly(arena.buffer)
        request_bytes = batches_of(WRITING_JOB).request_bytes
        target = Target(file, places.size_bytes // request_bytes * request_bytes, arena.buffer)
        num_bytes = write_once(target, places.engines[0], write_seconds, tell)
        written_bytes += num_bytes
        targets.append(replace(target, file_bytes=min(num_bytes, target.file_bytes)))
    shortest_bytes = min(target.file_bytes for target in targets)
    return [replace(target, file_bytes=shortest_bytes) for target in targets], written_bytes


def fill_randomly(buffer: Buffer) -> None:
    """Fill a buffer with bytes that no disk can compress."""
    words = buffer.tensor(torch.int64, buffer.num_bytes // 8)
    words.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(0))


def write_once(target: Target, engine_kind: str, limit_seconds: float | None, tell: Callable[[str], None]) -> int:
    """Write the file from its beginning, at least once and as far as `limit_seconds` allow; return the bytes written."""
    begin = told = time.perf_counter()
    num_bytes = 0
    with open_for([target], engine_kind, WRITING_JOB) as (engines, _):
        stream = Stream(engines[0], WRITING_JOB, target, batches_of(WRITING_JOB))
        stream.start()
        while num_bytes < target.file_bytes:
            num_bytes += stream.advance()
            now = time.perf_counter()
            if limit_seconds is not None and now - begin > limit_seconds:
                break
            if now - told > _TOLD_EVERY_SECONDS:
                told = now
                tell(f"writing the file: {format_bytes(num_bytes)} of {format_bytes(target.file_bytes)}")
        num_bytes += stream.drain()
    target.file.sync()
    return num_bytes


@contextmanager
def open_for(targets: Sequence[Target], kind: str, job: Job) -> Iterator[tuple[list[Engine], EngineFacts]]:
    """Yield an engine for each target, of a job's depth and block, to which file and buffers are registered.

    With them come the facts that hold for all of them. Raises PlatformError.
    """
    with ExitStack() as resources:
        engines = []
        for target in targets:
            engine = open_engine(kind, queue_depth=job.queue_depth, block_bytes=job.block_bytes)
            resources.callback(engine.close)
            used = MemoryRange(target.memory.address, batches_of(job).num_bytes)
            engine.register(files=[target.file], memory=[used])
            engines.append(engine)
        every = [engine.facts for engine in engines]
        yield (
            engines,
            EngineFacts(
                registered_files=all(facts.registered_files for facts in every),
                registered_buffers=all(facts.registered_buffers for facts in every),
                notes=tuple(dict.fromkeys(note for facts in every for note in facts.notes)),
            ),
        )
