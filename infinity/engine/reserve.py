"""Reserves what the plan names: weight slots, gradient slots, what is on the device. `resources` gives everything back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.engine.cut import CutModel
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.device import ComputeDevice, device_bytes
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, open_pool
from infinity.placement import Owner, Plan
from infinity.states import Tier
from infinity.store.unit_size import UnitLayouts
from infinity.zero.weights import Slot


def open_weight_slots(
    plan: Plan, ledger: Ledger, compute: ComputeDevice, pin: bool, resources: ExitStack, *, is_split: bool
) -> list[Slot]:
    """Reserve the slots of gathered weights; where shards are split their host side holds the part of this rank.

    Where nothing passes through their host side, because all weights stay in host memory, one page of it serves as staging
    for empty shards.
    """
    count = max(1, plan.num_weight_slots)
    is_one = compute.memory is None and not is_split
    host_bytes = plan.weight_slot_bytes if is_one else plan.host_weight_slot_bytes
    if host_bytes:
        arena = _arena(count * host_bytes, ledger, Owner.WEIGHT_SLOTS, pin, resources)
        hosts = [arena.part(index * host_bytes, host_bytes) for index in range(count)]
    else:
        hosts = [_arena(PAGE_BYTES, ledger, Owner.ROOT, pin, resources)] * count
    if is_one or plan.weight_slot_bytes == 0:
        return [Slot(host, host.tensor(torch.uint8, host.num_bytes)) for host in hosts]
    return [Slot(host, _on_device(plan.weight_slot_bytes, compute, ledger, Owner.WEIGHT_SLOTS, resources)) for host in hosts]


def _arena(num_bytes: int, ledger: Ledger, owner: Owner, pin: bool, resources: ExitStack) -> Buffer:
    arena = open_arena(num_bytes, ledger=ledger, tier=Tier.CPU, owner=owner.value, pin=pin)
    resources.callback(arena.close)
    return arena.buffer


def _on_device(num_bytes: int, compute: ComputeDevice, ledger: Ledger, owner: Owner, resources: ExitStack) -> torch.Tensor:
    if compute.memory is None:
        return _arena(num_bytes, ledger, owner, False, resources).tensor(torch.uint8, num_bytes)
    return device_bytes(num_bytes, compute=compute, ledger=ledger, owner=owner.value, resources=resources)


def open_kept_weights(
    host: Buffer, layouts: UnitLayouts, compute: ComputeDevice, ledger: Ledger, resources: ExitStack
) -> Slot:
    """Reserve the place on the compute device of whole weights that stay there; `host` holds those that this rank owns."""
    if compute.memory is None and not layouts.is_split:
        return Slot(host, host.tensor(torch.uint8, host.num_bytes))
    return Slot(host, _on_device(layouts.whole.unit_weight_bytes, compute, ledger, Owner.WEIGHTS, resources))


@dataclass(frozen=True, slots=True)
class ReductionBuffers:
    """Where one unit's gradient is summed over ranks, on the compute device."""

    flat: torch.Tensor  # of the largest whole unit, in the dtype of communication
    part: torch.Tensor  # grad_dtype, of the largest part; empty where the rest is not gathered


def open_reduction_buffers(
    plan: Plan, pieces: CutModel, sent: torch.dtype, grad_dtype: torch.dtype, compute: ComputeDevice, ledger: Ledger,
    resources: ExitStack,
) -> ReductionBuffers:  # fmt: skip
    """Reserve what `plan.reduction_bytes` counts, and book what collectives take; `sent`: the dtype of communication."""
    flat_bytes = max(layouts.whole.num_state_elements for layouts in pieces.unit_layouts) * sent.itemsize
    everything = _on_device(plan.reduction_bytes, compute, ledger, Owner.REDUCTION, resources)
    scratch = plan.owner_bytes(Owner.REDUCTION) - plan.reduction_bytes
    ledger.take(Tier.CPU, Owner.REDUCTION.value, scratch)
    resources.callback(ledger.give, Tier.CPU, Owner.REDUCTION.value, scratch)
    part = everything[round_up(flat_bytes, PAGE_BYTES) :]
    return ReductionBuffers(everything[:flat_bytes].view(sent), part.view(grad_dtype))


def open_device_gradient(
    pieces: CutModel, compute: ComputeDevice, grad_element_bytes: int, ledger: Ledger, resources: ExitStack
) -> torch.Tensor | None:
    """Reserve the buffer that finished gradients leave a device with memory of its own from: uint8; None without one."""
    if compute.memory is None:
        return None
    num_bytes = max(layout.grad_bytes(grad_element_bytes) for layout in pieces.layouts)
    return _on_device(num_bytes, compute, ledger, Owner.GRADIENT_SLOTS, resources)


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
