"""Random numbers that depend on where the model is, not on when it gets there.

At every entry to and exit from a unit the generator is set from (seed, step, global micro-batch index, position), so that
dropout masks are the same in every schedule, in the rerun, and for every world size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mixed_seed(*values: int) -> int:
    """Return 63 well-mixed bits of the given integers (the finaliser of SplitMix64, Steele et al., 2014)."""
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Randomness:
    """Sets the generators of the CPU and of the compute device; gives the user's own state back after use."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self.step = 0  # the optimizer step that the masks belong to; set by the engine

    def at(self, micro_batch: int, position: int) -> None:
        """Set the generators for the code that follows `position` of a micro-batch (its global index)."""
        value = mixed_seed(self._seed, self.step, micro_batch, position)
        torch.default_generator.manual_seed(value)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(value)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Restore the user's generators at the end of the block."""
        cpu_state = torch.default_generator.get_state()
        cuda = torch.cuda.default_generators[self._device.index or 0] if self._device.type == "cuda" else None
        cuda_state = cuda.get_state() if cuda is not None else None
        try:
            yield
        finally:
            torch.default_generator.set_state(cpu_state)
            if cuda is not None and cuda_state is not None:
                cuda.set_state(cuda_state)
