"""How weights get from where a load put them to the compute device, whole: copied, or gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.comm.group import Group
from infinity.errors import CommError
from infinity.handles import AllOf, Handle
from infinity.memory.arena import Buffer
from infinity.memory.transfer import Mark, Transfers, Upload
from infinity.store.layout import Section
from infinity.zero.shard import Residency, Shard


class Load(Protocol):
    """A load in progress: `wait` returns when the weights in the buffer are the new ones."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...

    @property
    def written(self) -> Handle[None]:
        """Done when nothing reads the buffer any more, so that it may be filled with something else."""
        ...


class Gather(Protocol):
    """Brings weights to the compute device."""

    @property
    def is_collective(self) -> bool:
        """Whether every rank has to make the same calls of `begin` in the same order. They need not wait for the load."""
        ...

    def begin(self, shard: Shard, source: Buffer, device: torch.Tensor, load: Load | None, after: Mark | None) -> Upload:
        """Begin to fill `device`, uint8 [at least unit_weight_bytes], with the shard's whole unit.

        `source` holds the owned weights, of a collective when `load` is done; `after` marks the last use of `device`.
        """
        ...


class Copy:
    """A rank that owns the whole of every shard."""

    is_collective = False

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def begin(self, shard: Shard, source: Buffer, device: torch.Tensor, load: Load | None, after: Mark | None) -> Upload:
        """Copy the loaded weights, where the device has memory of its own."""
        num_bytes = shard.whole.unit_weight_bytes
        return self._transfers.to_device(source.tensor(torch.uint8, num_bytes), device[:num_bytes], after=after)


class GatherParts:
    """A rank that owns a part of every shard. On the host's memory nobody waits: the data moves when the load is done."""

    is_collective = True

    def __init__(self, group: Group, transfers: Transfers, *, has_device_memory: bool) -> None:
        self._group = group
        self._transfers = transfers
        self._has_device_memory = has_device_memory

    def begin(self, shard: Shard, source: Buffer, device: torch.Tensor, load: Load | None, after: Mark | None) -> Upload:
        """Begin to gather the parts of every section; the ranks' parts lie in `device` as `shard.whole` says."""
        what = f"weights of {shard.layout.name}"
        stays = shard.residency is not Residency.ABSENT and load is not None  # what no update changes is there
        pairs = [
            (_owned(section, source), _whole(section, device))
            for section in shard.layout.sections
            if section.unit_elements and (section.trainable or not stays)
        ]
        if self._has_device_memory:
            return self._from_device(pairs, load, after, what)
        gathered = _Gathered(load, [self._group.all_gather(part, flat, what=what, after=load) for part, flat in pairs])
        return Upload(arrived=gathered, source_free=gathered)

    def _from_device(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], load: Load | None, after: Mark | None, what: str
    ) -> Upload:
        if load is not None:
            load.wait()
        uploads, gathers = [], []
        for part, flat in pairs:
            mine = flat.chunk(self._group.size)[self._group.rank]
            upload = self._transfers.to_device(part, mine, after=after)
            upload.wait()
            uploads.append(upload)
            gathers.append(self._group.all_gather(mine, flat, what=what))
        return Upload(AllOf(gathers), AllOf([upload.source_free for upload in uploads]))


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Over gloo: a load that fails ends the collective, and says more of it than that does."""

    load: Load | None
    parts: Sequence[Handle[None]]

    def wait(self) -> None:
        try:
            AllOf(self.parts).wait()
        except CommError:
            if self.load is not None and self.load.done():
                self.load.wait()
            raise

    def done(self) -> bool:
        return AllOf(self.parts).done()


def _owned(section: Section, source: Buffer) -> torch.Tensor:
    return source.tensor(torch.uint8, section.shard_elements * section.element_bytes, section.shard_byte_offset)


def _whole(section: Section, device: torch.Tensor) -> torch.Tensor:
    return device[section.unit_byte_offset : section.unit_byte_offset + section.unit_elements * section.element_bytes]
