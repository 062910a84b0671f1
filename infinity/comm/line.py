"""The line between the ranks on hosts: one thread that makes exchanges over gloo one after another, in the order asked for.

Before any data each rank sends every other the digest of its order (`order.py`), and goes on only where all agree: so data
of different collectives never meet, whatever their sizes. (Buffers of different sizes would end the process inside gloo.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.comm.order import DIGEST_BYTES, Entry
from infinity.comm.watch import Watch
from infinity.errors import IllegalTransition, InfinityError
from infinity.handles import Promise
from infinity.states import Lifecycle
from infinity.telemetry.recorder import Recorder

T = TypeVar("T")
_TAG, _NEVER_SENT = 0, 1
# How long the end of the line waits for its thread, once the transfer that this is in was ended.
_LAST_WAIT_SECONDS = 5.0
# A rank may take its time with a step; the watch, and not gloo, decides that one will never come.
_PATIENCE = timedelta(days=7)


class LineState(Enum):
    """OPEN: takes jobs. FAILED: the first error ended it, every handle has it. CLOSED: its thread has ended."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


LINE_MOVES = {
    LineState.OPEN: (LineState.FAILED, LineState.CLOSED),
    LineState.FAILED: (LineState.CLOSED,),
    LineState.CLOSED: (),
}


class PointToPoint(Protocol):
    """What the line needs of gloo; torch's stubs leave it out."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> dist.Work: ...


class PeerLost(Exception):
    """A transfer to or from `peer` failed; caught inside this room and raised outside as the CommError that explains it."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Transfers:
    """Sends and receives under way; it keeps their memory alive."""

    def __init__(self, works: Sequence[tuple[int, dist.Work, Tensor]]) -> None:
        self._works = works

    def wait(self) -> None:
        for peer, work, _ in self._works:
            try:
                work.wait(_PATIENCE)
            except RuntimeError as error:
                raise PeerLost(peer, str(error).splitlines()[0]) from error


class Peers:
    """Point-to-point transfers of flat CPU tensors with every other rank. Used by the line's thread only."""

    def __init__(self, backend: PointToPoint, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.others = tuple(peer for peer in range(size) if peer != rank)
        self._backend = backend

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Transfers:
        """Begin transfers with pairs (rank, contiguous tensor) of any dtype; those without elements are left out."""
        works = [
            (peer, self._call(peer, start, tensor.view(torch.uint8)), tensor)
            for start, pairs in ((self._backend.recv, receives), (self._backend.send, sends))
            for peer, tensor in pairs
            if tensor.numel() > 0
        ]
        return Transfers(works)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Make transfers and wait for all of them."""
        self.start(sends, receives).wait()

    def exchange_bytes(self, mine: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Give `mine` to every rank and return what all gave, in rank order; `lengths`: how many bytes each rank gives."""
        if not any(lengths):
            return [b""] * self.size
        outgoing = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
        incoming = {peer: torch.empty(lengths[peer], dtype=torch.uint8) for peer in self.others}
        self.exchange([(peer, outgoing) for peer in self.others], list(incoming.items()))
        return [mine if rank == self.rank else incoming[rank].numpy().tobytes() for rank in range(self.size)]

    def hang_up(self) -> None:
        """End every transfer that is under way. gloo has no call for it, but closes its connections when one is too late."""
        try:
            self._backend.recv([torch.empty(1, dtype=torch.uint8)], self.others[0], _NEVER_SENT).wait(
                timedelta(milliseconds=1)
            )
        except RuntimeError:
            return

    def _call(self, peer: int, start: Callable[[list[Tensor], int, int], dist.Work], data: Tensor) -> dist.Work:
        try:
            return start([data], peer, _TAG)
        except RuntimeError as error:
            raise PeerLost(peer, str(error).splitlines()[0]) from error


class _Job(Generic[T]):
    """One exchange that was asked for, and the handle on it."""

    __slots__ = ("entry", "promise", "work")

    def __init__(self, entry: Entry, work: Callable[[], T]) -> None:
        self.entry = entry
        self.work = work
        self.promise: Promise[T] = Promise()

    def make(self) -> None:
        self.promise.resolve(self.work())


class Line:
    """Its opener closes it. One thread at a time submits; the thread of the line makes the jobs in that order.

    The first error fails every handle that is not done and refuses further jobs. A job that hangs in gloo then stays where
    it is, on a daemon thread that keeps its buffers, until `close`.
    """

    def __init__(self, peers: Peers, watch: Watch, recorder: Recorder, on_failure: Callable[[InfinityError], None]) -> None:
        self._peers = peers
        self._on_failure = on_failure  # hears of the error that ended the line, once
        self._watch = watch
        self._recorder = recorder  # gets a span "comm.exchange" for each job, from when all ranks have come to it
        self._changed = threading.Condition()
        self._jobs: deque[_Job[object]] = deque()  # the first is being made
        self._error: InfinityError | None = None
        self._lifecycle = Lifecycle("Line between ranks", LineState.OPEN, LINE_MOVES)
        self._thread = threading.Thread(target=self._run, name="comm-line", daemon=True)

    def start(self) -> None:
        """Start the thread (called once, by who opens the group)."""
        self._thread.start()

    def submit(self, entry: Entry, work: Callable[[], T]) -> Promise[T]:
        """Queue an exchange that every rank makes at this place of its order. Raises the error that ended the line."""
        job = _Job(entry, work)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._lifecycle.state is not LineState.OPEN:
                raise IllegalTransition(f"Line between ranks: {entry.what} was asked for after close().")
            self._jobs.append(job)  # type: ignore[arg-type]  # the queue never reads a result
            self._changed.notify()
        return job.promise

    def fail(self, error: InfinityError) -> None:
        """End the line: whoever waits gets `error`, whatever gloo is doing. Any thread; only the first error counts."""
        with self._changed:
            if self._lifecycle.state is not LineState.OPEN:
                return
            self._lifecycle.to(LineState.FAILED)
            self._error = error
            for job in self._jobs:
                job.promise.fail(error)
            self._jobs.clear()
            self._changed.notify()
        self._on_failure(error)

    def close(self) -> None:
        """End the thread when the queued jobs are made; after an error, at once: a transfer that hangs is ended.

        A thread that came back from gloo while Python shuts down would abort the process.
        """
        with self._changed:
            if self._lifecycle.state is LineState.CLOSED:
                return
            failed = self._lifecycle.state is LineState.FAILED
            self._lifecycle.to(LineState.CLOSED)
            self._changed.notify()
        if not failed:
            self._thread.join()
        elif threading.current_thread() is not self._thread:
            self._peers.hang_up()
            self._thread.join(_LAST_WAIT_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._lifecycle.state is not LineState.OPEN)
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                self._agree(job.entry)
                with self._recorder.span("comm.exchange", what=job.entry.what):
                    job.make()
            except PeerLost as lost:
                self.fail(self._watch.explain(lost, lost.peer))
                return
            except InfinityError as error:  # of this rank: what was to be sent could not be had
                self.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - the thread's boundary: whoever waits must hear of it
                self.fail(self._watch.explain(error))
                return
            with self._changed:
                if self._jobs:
                    self._jobs.popleft()

    def _agree(self, entry: Entry) -> None:
        """Return when every rank has come to this place of the same order; raise RuntimeError where one is in another."""
        mine = bytes.fromhex(entry.digest)
        for rank, theirs in enumerate(self._peers.exchange_bytes(mine, [DIGEST_BYTES] * self._peers.size)):
            if theirs != mine:
                raise RuntimeError(f"rank {rank} came with another collective than {entry}")
