"""How many GPUs this machine offers to ranks."""

from __future__ import annotations

import torch

from infinity.errors import ConfigError


def require_gpus(num_ranks: int) -> None:
    """Raise ConfigError where this machine has not a GPU for each of `num_ranks` ranks."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= num_ranks:
        return
    remedy = "Give --num-ranks instead: the CPU computes." if num_gpus == 0 else f"Give --num-gpus {num_gpus}."
    raise ConfigError(f"--num-gpus {num_ranks}: torch finds {num_gpus} GPUs here.", remedy=remedy)
