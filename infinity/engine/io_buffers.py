"""The buffers that reads and writes move through, made known to the I/O engine in one place."""

from __future__ import annotations

from contextlib import ExitStack

from infinity.aio.engine import Engine as IoEngine
from infinity.aio.engine import MemoryRange
from infinity.memory.pool import BufferPool
from infinity.optim.stream import UpdateStream
from infinity.states import Tier
from infinity.store.extents import Shards
from infinity.store.store import Store
from infinity.zero.weights import Slot


def register_io_buffers(
    engine: IoEngine,
    store: Store,
    stream: UpdateStream,
    weight_slots: list[Slot],
    gradient_slots: BufferPool | None,
    shards: Shards,
    resources: ExitStack,
) -> None:
    """Register what the steps' I/O goes through, until `resources` is closed; call it when all of it is open.

    States that stay in host memory are left out: only a checkpoint in place writes them.
    """
    buffers = [store.tile_buffer, stream.gradient_buffer, gradient_slots.buffer if gradient_slots else None]
    if any(shares.params is Tier.NVME for _, shares in shards):
        buffers += [slot.host for slot in weight_slots]
    memory = tuple(MemoryRange(buffer.address, buffer.num_bytes) for buffer in buffers if buffer is not None)
    engine.register(memory=memory)
    resources.callback(engine.unregister, memory=memory)
