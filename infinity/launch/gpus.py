"""Whether this machine has the GPUs that ranks need."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError


def require_gpus(num_ranks: int, *, asked: bool) -> None:
    """Raise ConfigError where `num_ranks` ranks would not have a GPU each. Without any the CPU computes, unless `asked`."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= num_ranks or (num_gpus == 0 and not asked):
        return
    if num_gpus == 0:
        raise ConfigError(
            f"--num-gpus {num_ranks}: torch finds no GPU here.", remedy="Give --num-ranks instead: the CPU computes."
        )
    raise ConfigError(
        f"{num_ranks} ranks need a GPU each, and torch finds {num_gpus} here.",
        remedy=f"Give --num-gpus {num_gpus}, or hide the GPUs from torch (CUDA_VISIBLE_DEVICES=) and let the CPU compute.",
    )
