"""Buffers that a unit changes while it runs (running statistics): put back for the rerun, kept as the first run left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferValue:
    """The value of a module's buffer at one moment."""

    module: nn.Module
    name: str
    value: torch.Tensor  # a copy


def buffer_values(module: nn.Module) -> tuple[BufferValue, ...]:
    """Return copies of all buffers of a unit. They live until the first run has ended; most units have few or none."""
    return tuple(
        BufferValue(part, name, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    )


def changed(before: Sequence[BufferValue]) -> tuple[BufferValue, ...]:
    """Return the earlier values of those buffers that differ from them by now.

    Compared by value, for batch normalisation changes its statistics without a trace in the version counters.
    """
    return tuple(buffer for buffer in before if not _equal(buffer.value, buffer.module._buffers[buffer.name]))


def restore(earlier: Sequence[BufferValue]) -> None:
    """Give buffers their earlier values back."""
    with torch.no_grad():
        for buffer in changed(earlier):
            _current(buffer).copy_(buffer.value)


@contextmanager
def put_back(earlier: Sequence[BufferValue]) -> Iterator[None]:
    """Give buffers their earlier values for the time of the block."""
    current = [(buffer, _current(buffer).detach().clone()) for buffer in earlier]
    with torch.no_grad():
        for buffer in earlier:
            _current(buffer).copy_(buffer.value)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in current:
                _current(buffer).copy_(value)


def _current(buffer: BufferValue) -> torch.Tensor:
    tensor = buffer.module._buffers[buffer.name]
    return tensor if tensor is not None else buffer.value


def _equal(value: torch.Tensor, now: torch.Tensor | None) -> bool:
    return now is not None and now.shape == value.shape and now.dtype == value.dtype and torch.equal(value, now)
