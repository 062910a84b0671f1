"""Buffers that a unit changes (running statistics): put back for the rerun, kept as the first run left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferValue:
    """A module's buffer at one moment."""

    module: nn.Module
    name: str
    tensor: torch.Tensor  # the buffer itself: a module may put another one in its place
    value: torch.Tensor  # a copy


def buffer_values(module: nn.Module) -> tuple[BufferValue, ...]:
    """Return copies of all buffers of a unit. They live until the first run has ended; most units have few or none."""
    return tuple(
        BufferValue(part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    )


def changed(before: Sequence[BufferValue]) -> tuple[BufferValue, ...]:
    """Return the earlier state of those buffers that were replaced or have other values by now.

    Compared by value, for batch normalisation changes its statistics without a trace in the version counters.
    """
    return tuple(
        buffer
        for buffer in before
        if buffer.module._buffers.get(buffer.name) is not buffer.tensor or not torch.equal(buffer.value, buffer.tensor)
    )


def restore(earlier: Sequence[BufferValue]) -> None:
    """Give buffers their earlier values back, in the tensors that held them."""
    with torch.no_grad():
        for buffer in earlier:
            buffer.tensor.copy_(buffer.value)
            buffer.module._buffers[buffer.name] = buffer.tensor


@contextmanager
def put_back(earlier: Sequence[BufferValue]) -> Iterator[None]:
    """Give buffers their earlier values for the time of the block."""
    now = [buffer.module._buffers.get(buffer.name) for buffer in earlier]
    tensors = [*(buffer.tensor for buffer in earlier), *(tensor for tensor in now if tensor is not None)]
    contents = [(tensor, tensor.detach().clone()) for tensor in tensors]
    restore(earlier)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in contents:
                tensor.copy_(value)
        for buffer, tensor_now in zip(earlier, now, strict=True):
            buffer.module._buffers[buffer.name] = tensor_now
