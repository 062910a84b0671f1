"""Deterministic kernels for the time of an engine: the same bits in every run also where torch would choose faster ones."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch

# cuBLAS reads it when it first multiplies; with this much workspace it may use no other kernels (CUDA toolkit, cuBLAS,
# "Results reproducibility").
_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def compute_deterministically(resources: ExitStack) -> None:
    """Let torch use deterministic kernels only; operations that have none raise. `resources` restores the setting.

    A process that multiplied on a GPU before must have set CUBLAS_WORKSPACE_CONFIG by then; torch says so otherwise.
    """
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    resources.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
    os.environ.setdefault(*_CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
