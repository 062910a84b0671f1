"""How much memory torch takes inside units: measured, for only the model's own code decides it."""

from __future__ import annotations

from infinity.memory.device import ComputeDevice, DeviceMemory
from infinity.memory.host_allocator import release_free_memory
from infinity.memory.ledger import Ledger
from infinity.memory.limits import rss_bytes
from infinity.placement.plan import Owner
from infinity.states import Tier


class ActivationMeter:
    """Samples the process while units run and books what neither the base nor the ledger's owners explain.

    On the CPU it is RSS above the base (after importing torch) less what is booked; untouched pages of arenas make it a
    little too small. On a device with memory of its own it is the allocator's own peak, above what others had allocated.
    """

    def __init__(self, ledger: Ledger, memory: DeviceMemory | None, base_bytes: int, planned_bytes: int) -> None:
        self._ledger = ledger
        self._memory = memory
        self._tier = Tier.CPU if memory is None else Tier.GPU
        self._base_bytes = base_bytes  # what the engine does not answer for
        self._planned_bytes = planned_bytes  # of host memory, all owners together
        self._most_bytes = 0
        self._entered_bytes = 0  # this meter's own entry in the ledger

    def sample(self) -> None:
        """Called while a unit's activations are alive."""
        if self._memory is None:
            self._see(rss_bytes())

    def book(self) -> None:
        """Called after each step: enter the most that was seen, and give free memory back where it exceeds the plan."""
        if self._memory is not None:
            self._see(self._memory.peak_bytes())
        elif rss_bytes() - self._base_bytes > self._planned_bytes:
            release_free_memory()
        self._entered_bytes = self._most_bytes
        self._ledger.observe(self._tier, Owner.ACTIVATIONS.value, self._entered_bytes)

    def _see(self, held_bytes: int) -> None:
        booked = self._ledger.used(self._tier) - self._entered_bytes
        self._most_bytes = max(self._most_bytes, held_bytes - self._base_bytes - booked)


def open_activation_meter(
    ledger: Ledger, compute: ComputeDevice, *, host_base_bytes: int, planned_bytes: int
) -> ActivationMeter:
    """Return a meter; called when everything else is reserved. `host_base_bytes` is RSS before any model existed."""
    if compute.memory is None:
        return ActivationMeter(ledger, None, host_base_bytes, planned_bytes)
    compute.memory.reset_peak()
    base_bytes = max(0, compute.memory.allocated_bytes() - ledger.used(Tier.GPU))
    return ActivationMeter(ledger, compute.memory, base_bytes, planned_bytes)
