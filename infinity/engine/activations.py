"""How much memory torch takes inside units: measured, for only the model's own code decides it."""

from __future__ import annotations

import torch

from infinity.memory.host_allocator import release_free_memory
from infinity.memory.ledger import Ledger
from infinity.memory.limits import rss_bytes
from infinity.placement.plan import Owner
from infinity.states import Tier


class ActivationMeter:
    """Samples the process while units run and books what neither the base nor the ledger's owners explain.

    On the CPU it is RSS above the base (after importing torch) less what is booked; untouched pages of arenas make it a
    little too small. On a GPU it is the allocator's own peak.
    """

    def __init__(self, ledger: Ledger, device: torch.device, base_bytes: int, planned_bytes: int) -> None:
        self._ledger = ledger
        self._device = device
        self._base_bytes = base_bytes
        self._planned_bytes = planned_bytes  # of host memory, all owners together
        self._most_bytes = 0
        self._entered_bytes = 0  # this meter's own entry in the ledger

    def sample(self) -> None:
        """Called while a unit's activations are alive."""
        if self._device.type != "cuda":
            booked = self._ledger.used(Tier.CPU) - self._entered_bytes
            self._most_bytes = max(self._most_bytes, rss_bytes() - self._base_bytes - booked)

    def book(self) -> None:
        """Called after each step: enter the most that was seen, and give free memory back where it exceeds the plan."""
        if self._device.type == "cuda":
            booked = self._ledger.used(Tier.GPU) - self._entered_bytes
            self._most_bytes = max(self._most_bytes, torch.cuda.max_memory_allocated(self._device) - booked)
        elif rss_bytes() - self._base_bytes > self._planned_bytes:
            release_free_memory()
        self._entered_bytes = max(0, self._most_bytes)
        tier = Tier.CPU if self._device.type == "cpu" else Tier.GPU
        self._ledger.observe(tier, Owner.ACTIVATIONS.value, self._entered_bytes)
