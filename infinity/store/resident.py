"""Bytes that stay in RAM, with the same two verbs as those in a swap file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from infinity.handles import Handle, Ready
from infinity.memory.arena import Buffer
from infinity.store.checksums import Part


class ResidentBytes:
    """Whole pages of an arena. Reading and writing copy at once; with the very same buffer there is nothing to do."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def read(self, into: Buffer, *, offset: int = 0, num_bytes: int | None = None) -> Handle[None]:
        """Copy from `offset`, to the end unless `num_bytes` is given, into `into`."""
        length = self.buffer.num_bytes - offset if num_bytes is None else num_bytes
        _copy(into.part(0, length), self.buffer.part(offset, length))
        return Ready(None)

    def write(
        self, source: Buffer, *, offset: int = 0, num_bytes: int | None = None, read_as: Sequence[Part] | None = None
    ) -> Handle[None]:
        """Copy the first bytes of `source` over these from `offset`, to the end unless `num_bytes` is given."""
        length = self.buffer.num_bytes - offset if num_bytes is None else num_bytes
        _copy(self.buffer.part(offset, length), source.part(0, length))
        return Ready(None)


class NoBytes:
    """The bytes of a state that a shard does not have, such as the gradient of a frozen one."""

    def read(self, into: Buffer, *, offset: int = 0, num_bytes: int | None = None) -> Handle[None]:
        return Ready(None)

    def write(
        self, source: Buffer, *, offset: int = 0, num_bytes: int | None = None, read_as: Sequence[Part] | None = None
    ) -> Handle[None]:
        return Ready(None)


def _copy(target: Buffer, source: Buffer) -> None:
    if target.address != source.address:
        ctypes.memmove(target.address, source.address, target.num_bytes)
