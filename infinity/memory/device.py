"""The compute device: where torch computes, whether it has memory of its own, and booked buffers in that memory.

On a machine without a GPU the CPU plays the device. Host memory then *is* the device's: nothing is copied or booked twice.
Everything else asks a `ComputeDevice` whether it has memory of its own, never which kind of device it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.byte_sizes import format_bytes
from infinity.errors import ConfigError, OverBudget
from infinity.memory.ledger import Ledger
from infinity.memory.transfer import Transfers, open_transfers
from infinity.states import Tier


class DeviceMemory(Protocol):
    """A device's own memory, as its allocator counts it in bytes."""

    def free_bytes(self) -> int:
        """Return what can still be taken."""
        ...

    def allocated_bytes(self) -> int:
        """Return what living tensors take."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that living tensors took since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is allocated now."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """The memory of a CUDA device and torch's allocator in it."""

    device: torch.device

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """Where torch computes, and how tensors come there and back."""

    torch_device: torch.device
    transfers: Transfers
    memory: DeviceMemory | None  # None: the host's memory is the device's

    @property
    def tier(self) -> Tier:
        """The tier that it is."""
        return Tier.CPU if self.memory is None else Tier.GPU


def host_device() -> ComputeDevice:
    """Return the CPU as the compute device."""
    device = torch.device("cpu")
    return ComputeDevice(device, open_transfers(device), None)


def take_local_gpu(local_rank: int) -> None:
    """Make the GPU of one of this machine's ranks the current one; a rank that is shown one GPU or none has no choice.

    Raises ConfigError where there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        return
    if local_rank >= num_gpus:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} has no GPU: torch finds {num_gpus} here.",
            remedy=f"Start {num_gpus} ranks, or hide the GPUs from torch (CUDA_VISIBLE_DEVICES=) and let the CPU compute.",
        )
    torch.cuda.set_device(local_rank)


def open_compute_device() -> ComputeDevice:
    """Return the current CUDA device, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return host_device()
    device = torch.device("cuda", torch.cuda.current_device())
    return ComputeDevice(device, open_transfers(device), CudaMemory(device))


def device_bytes(
    num_bytes: int, *, compute: ComputeDevice, ledger: Ledger, owner: str, resources: ExitStack
) -> torch.Tensor:
    """Book and allocate a buffer in the memory of a device that has its own: uint8 [num_bytes], not initialised.

    `resources` gives the booking back. Raises OverBudget when the ledger or the device refuses.
    """
    ledger.take(Tier.GPU, owner, num_bytes)
    resources.callback(ledger.give, Tier.GPU, owner, num_bytes)
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=compute.torch_device)
    except torch.OutOfMemoryError as error:
        free = 0 if compute.memory is None else compute.memory.free_bytes()
        raise OverBudget(
            f"gpu memory: the device refuses {owner} {format_bytes(num_bytes)} ({num_bytes} bytes); "
            f"{format_bytes(free)} are free.",
            remedy="Lower --gpu-memory, or end what else uses the device.",
        ) from error
