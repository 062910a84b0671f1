"""Reserves what the plan names: the I/O engine, weight slots, gradient slots. `resources` gives everything back."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from infinity.aio.engine import Engine as IoEngine
from infinity.aio.select import open_engine, probe
from infinity.byte_sizes import PAGE_BYTES
from infinity.config import Config
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, open_pool
from infinity.placement import Owner, Plan
from infinity.states import Tier
from infinity.store.checks import check_directory
from infinity.zero.weights import Slot


def open_io(config: Config, plan: Plan, resources: ExitStack) -> tuple[IoEngine, tuple[str, ...]]:
    """Return the I/O engine that works in the directories, and what was not available there."""
    kind: str = config.infinity.engine if plan.uses_nvme else "threads"
    notes: list[str] = []
    for directory in config.nvme_directories if plan.uses_nvme else ():
        check_directory(directory)
        found = probe(directory, kind)
        kind = found.engine if kind == "auto" else kind
        notes += found.notes
    engine = open_engine(kind, queue_depth=config.aio.queue_depth, block_bytes=config.aio.block_size)
    resources.callback(engine.close)
    return engine, tuple(notes)


def open_weight_slots(plan: Plan, ledger: Ledger, device: torch.device, pin: bool, resources: ExitStack) -> list[Slot]:
    """Reserve the slots of gathered weights; where there are none, one page serves as staging for empty shards."""
    count = plan.num_weight_slots
    if count == 0:
        return [
            Slot(_arena(PAGE_BYTES, ledger, Owner.ROOT, pin, resources), torch.empty(0, dtype=torch.uint8, device=device))
        ]
    slot_bytes = plan.weight_slot_bytes if device.type == "cpu" else max(plan.weight_slot_bytes, plan.host_weight_slot_bytes)
    arena = _arena(count * slot_bytes, ledger, Owner.WEIGHT_SLOTS, pin, resources)
    return [slot_over(arena.part(index * slot_bytes, slot_bytes), device) for index in range(count)]


def _arena(num_bytes: int, ledger: Ledger, owner: Owner, pin: bool, resources: ExitStack) -> Buffer:
    arena = open_arena(num_bytes, ledger=ledger, tier=Tier.CPU, owner=owner.value, pin=pin)
    resources.callback(arena.close)
    return arena.buffer


def slot_over(host: Buffer, device: torch.device) -> Slot:
    """Return a slot over host memory, with as much on the compute device where that is another."""
    flat = host.tensor(torch.uint8, host.num_bytes)
    return Slot(host, flat if device.type == "cpu" else torch.empty_like(flat, device=device))


def open_gradient_slots(plan: Plan, ledger: Ledger, pin: bool, resources: ExitStack) -> BufferPool | None:
    """Reserve the slots that spilled gradients leave through; nothing where none is spilled."""
    if plan.num_gradient_slots == 0:
        return None
    pool = open_pool(
        slot_bytes=plan.gradient_slot_bytes,
        num_slots=plan.num_gradient_slots,
        ledger=ledger,
        tier=Tier.CPU,
        owner=Owner.GRADIENT_SLOTS.value,
        pin=pin,
    )
    resources.callback(pool.close)
    return pool
