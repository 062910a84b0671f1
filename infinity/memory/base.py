"""What the process needs before any model exists: the base above which budgets count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from infinity.memory.limits import rss_bytes

_SIZE = 64


def measure_base(read_rss_bytes: Callable[[], int] = rss_bytes) -> int:
    """Return RSS after torch has run a unit's usual kernels once, forward and backward, in bf16 and fp32.

    Their libraries load code and make thread pools on first use, about 0.1 GiB that belongs to no model.
    """
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1, 4, _SIZE, _SIZE, dtype=dtype, requires_grad=True)
            weight = torch.randn(_SIZE, _SIZE, dtype=dtype, requires_grad=True)
            y = F.scaled_dot_product_attention(F.linear(F.layer_norm(x, (_SIZE,)), weight), x, x, is_causal=True)
            logits = F.gelu(F.linear(y, weight)).float().view(-1, _SIZE)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
            torch.autograd.backward([loss], [torch.ones_like(loss)])  # with gradients given, it imports a library more
    return read_rss_bytes()
