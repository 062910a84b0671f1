"""The ranks of a run between two steps: which signal stops all of them, what each has to say, what each has taken."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, cast

from infinity.comm.group import Group
from infinity.memory.limits import pss_bytes
from infinity.train.shared_memory import SharedMemoryPeak
from infinity.train.stopping import StopRequest
from infinity.train.summary import RankFacts
from infinity.train.voice import Voice


class Together:
    """What a rank tells the others. Every rank makes the same calls in the same order; on one rank they only return."""

    def __init__(self, group: Group, request: StopRequest, voice: Voice) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._request = request
        self._voice = voice
        self._shared_peak = SharedMemoryPeak(pss_bytes)

    def meet(self) -> None:
        """Between steps: a signal that came to any rank is one for all, and rank 0 shows what the others say."""
        if self.size > 1:
            self._shared_peak.look()
        signal, notes = self._request.signal or 0, self._voice.take_untold()
        said = self._group.gather([int(signal), notes if self.rank else []], what="signals and notes")
        told = [cast("tuple[int, list[str]]", theirs) for theirs in said]
        self._request.agree([number for number, _ in told])
        if self.rank == 0:
            for rank, (_, theirs) in enumerate(told):
                self._voice.repeat(rank, theirs)

    def from_rank_0(self, value: Mapping[str, str | None], *, what: str) -> dict[str, str | None]:
        """Return the value of rank 0."""
        return cast("dict[str, str | None]", self._group.gather(value, what=what)[0])

    def in_turn(self, losses: Sequence[float]) -> list[float]:
        """Return the losses of all ranks, which took turns: the first of each rank, then the second of each."""
        gathered = [cast("list[float]", theirs) for theirs in self._group.gather(losses, what="losses of an evaluation")]
        return [loss for turn in zip_longest(*gathered) for loss in turn if loss is not None]

    def facts(
        self, *, cpu_memory_peak_bytes: int, rss_peak_bytes: int, nvme_read_bytes: int, nvme_write_bytes: int
    ) -> tuple[RankFacts, ...]:
        """Return what every rank has taken, in rank order."""
        mine = RankFacts(
            self.rank,
            socket.gethostname(),
            cpu_memory_peak_bytes,
            rss_peak_bytes,
            self._shared_peak.num_bytes,
            nvme_read_bytes,
            nvme_write_bytes,
        )
        return tuple(RankFacts(**cast(Any, theirs)) for theirs in self._group.gather(asdict(mine), what="what a rank took"))
