"""The global gradient norm from sums of squares that are added in a fixed order, and the clip coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def combine_partials(partials: NDArray[np.float64] | Sequence[float]) -> float:
    """Return the sum in a fixed tree: neighbours are added pairwise, an odd last one is carried to the next level.

    The result depends on the values and their order only; it is not finite where one of them is not. An empty sum is 0.
    """
    level = np.asarray(partials, dtype=np.float64)
    if level.size == 0:
        return 0.0
    while level.size > 1:
        paired = level[: level.size // 2 * 2]
        level = np.concatenate([paired[0::2] + paired[1::2], level[paired.size :]])
    return float(level[0])


def global_norm(shard_sums: Sequence[float]) -> float:
    """Return the L2 norm over all shards, given their sums of squares in the order of the shards (and of the ranks)."""
    return math.sqrt(combine_partials(shard_sums))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return what gradients are multiplied by, as torch.nn.utils.clip_grad_norm_ computes it; NaN where the norm is."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
