"""The memory that a step's activations are planned with: an estimate, and what the allocator keeps above it; torch-free."""

from __future__ import annotations

from infinity.byte_sizes import MIB
from infinity.models.presets import GPTConfig, activation_bytes
from infinity.placement import Schedule

# What the C library's allocator keeps above the tensors that are alive.
_ALLOCATOR_SHARE = 1.25
_ALLOCATOR_BYTES = 36 * MIB


def activation_budget_bytes(
    gpt: GPTConfig, *, micro_batch_size: int, seq_len: int, num_micro_batches: int, schedule: Schedule, dtype_bytes: int
) -> int:
    """Return the bytes that one rank's activations are planned with when every block is rerun."""
    estimate = activation_bytes(
        gpt,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        num_micro_batches=num_micro_batches if schedule is Schedule.VERTICAL else 1,
        dtype_bytes=dtype_bytes,
    )
    return int(estimate * _ALLOCATOR_SHARE) + _ALLOCATOR_BYTES
