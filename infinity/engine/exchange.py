"""What ranks have parts of, brought together in host memory, one parameter or one tile at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.byte_sizes import MIB
from infinity.comm.group import Group
from infinity.engine.planes import num_parts, part_of, runs_of
from infinity.store.layout import ShardLayout

_STAGED_BYTES = 4 * MIB  # of device memory, where the group's buffers are there


@dataclass(frozen=True, slots=True)
class Exchange:
    """Moves host memory between ranks. Every rank makes the same calls in the same order. Raises CommError."""

    group: Group
    device: torch.device  # where the group's buffers are

    def broadcast(self, values: torch.Tensor, *, source: int, what: str) -> None:
        """Fill `values`, 1-D in host memory, with those of rank `source`."""
        if self.group.size == 1 or not values.numel():
            return
        if self.device.type == "cpu":
            self.group.broadcast(values, source=source, what=what).wait()
            return
        flat = values.view(torch.uint8)
        for begin in range(0, flat.numel(), _STAGED_BYTES):
            piece = flat[begin : begin + _STAGED_BYTES]
            staged = piece.to(self.device)
            self.group.broadcast(staged, source=source, what=what).wait()
            piece.copy_(staged)

    def whole(self, layout: ShardLayout, parameter: str, own: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return all elements of a parameter, 1-D, from each rank's own ones; where one rank has them all, `own` itself."""
        if num_parts(layout) == 1:
            return own
        full = torch.empty(layout.spec(parameter).numel, dtype=own.dtype)
        for rank in range(num_parts(layout)):
            for run in runs_of(part_of(layout, rank), parameter):
                piece = full[run.parameter_offset : run.parameter_offset + run.length]
                if rank == self.group.rank:
                    piece.copy_(own)
                self.broadcast(piece, source=rank, what=f"{what} of {parameter}")
        return full
