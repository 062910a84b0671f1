"""A job's traffic at an engine: the oldest batch is waited for, and the next one takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infinity.aio.engine import Engine, RequestHandle
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request
from infinity.bench.nvme_jobs import Batches, Job, Traffic
from infinity.handles import AllOf
from infinity.memory.arena import Buffer

_DRAWN_AT_ONCE = 4096  # random places


@dataclass(frozen=True, slots=True)
class Target:
    """A file that was written once, of which the first `file_bytes` are used, and the memory that is moved to and from."""

    file: DirectFile
    file_bytes: int
    memory: Buffer


class Blocks:
    """Gives the requests of a job one after another: direction, place in the file, place in memory.

    Reads and writes of a mixed job take turns, and each direction walks through the file for itself, as in fio.
    """

    def __init__(self, job: Job, target: Target, request_bytes: int) -> None:
        self._target = target
        self._request_bytes = request_bytes
        self._num_places = target.file_bytes // request_bytes
        self._directions = {
            Traffic.READ: (Op.READ, Op.READ),
            Traffic.WRITE: (Op.WRITE, Op.WRITE),
            Traffic.MIXED: (Op.READ, Op.WRITE),
        }[job.traffic]
        self._random = np.random.default_rng(0) if job.is_random else None
        self._drawn_places: list[int] = []
        self._next_place = dict.fromkeys(Op, 0)
        self._num_given = 0

    def next_request(self, memory_offset: int) -> Request:
        """Return the next request, on the memory from `memory_offset` on."""
        op = self._directions[self._num_given & 1]
        self._num_given += 1
        target, length = self._target, self._request_bytes
        offset = self._place(op) * length
        return Request(op, target.file, offset, target.memory.address + memory_offset, length, target.memory)

    def _place(self, op: Op) -> int:
        if self._random is None:
            place = self._next_place[op]
            self._next_place[op] = (place + 1) % self._num_places
            return place
        if not self._drawn_places:
            self._drawn_places = self._random.integers(0, self._num_places, _DRAWN_AT_ONCE).tolist()
        return self._drawn_places.pop()


class Stream:
    """Keeps the batches of a job at an engine. Not thread-safe; what is in flight when it fails, the engine finishes."""

    def __init__(self, engine: Engine, job: Job, target: Target, batches: Batches) -> None:
        self._engine = engine
        self._batches = batches
        self._blocks = Blocks(job, target, batches.request_bytes)
        self._pending: deque[tuple[int, list[RequestHandle]]] = deque()
        self.finished: Sequence[RequestHandle] = ()  # the requests of the batch that was waited for last

    def start(self) -> None:
        """Submit the first batches."""
        for index in range(self._batches.num_batches):
            self._submit(index)

    def advance(self) -> int:
        """Wait for the oldest batch, submit the next one in its memory, and return the bytes that the oldest has moved."""
        index = self._finish_oldest()
        self._submit(index)
        return self._batches.batch_bytes

    def drain(self) -> int:
        """Wait for all batches and return the bytes that they have moved."""
        count = len(self._pending)
        while self._pending:
            self._finish_oldest()
        return count * self._batches.batch_bytes

    def _finish_oldest(self) -> int:
        index, self.finished = self._pending.popleft()
        AllOf(self.finished).wait()
        return index

    def _submit(self, index: int) -> None:
        batches = self._batches
        first = index * batches.batch_bytes
        offsets = range(first, first + batches.batch_bytes, batches.request_bytes)
        requests = [self._blocks.next_request(offset) for offset in offsets]
        self._pending.append((index, self._engine.submit(requests)))
