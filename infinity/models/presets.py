"""Sizes of the built-in decoder, named by parameter count, and what they need; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from infinity.errors import ConfigError

BYTE_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of the decoder in models/gpt.py."""

    num_layers: int
    width: int
    num_heads: int
    hidden: int  # inner width of SwiGLU, about 8/3 of the width
    vocab_size: int = BYTE_VOCABULARY
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


PRESETS: Mapping[str, GPTConfig] = MappingProxyType({
    "gpt-1m": GPTConfig(num_layers=5, width=128, num_heads=4, hidden=320),
    "gpt-25m": GPTConfig(num_layers=8, width=512, num_heads=8, hidden=1344),
    "gpt-124m": GPTConfig(num_layers=17, width=768, num_heads=12, hidden=2112),
    "gpt-400m": GPTConfig(num_layers=32, width=1024, num_heads=16, hidden=2688),
    "gpt-1b": GPTConfig(num_layers=20, width=2048, num_heads=16, hidden=5440),
    "gpt-2b": GPTConfig(num_layers=25, width=2560, num_heads=20, hidden=6912),
    "gpt-4b": GPTConfig(num_layers=35, width=3072, num_heads=24, hidden=8320),
    "gpt-7b": GPTConfig(num_layers=34, width=4096, num_heads=32, hidden=11264),
    "gpt-13b": GPTConfig(num_layers=41, width=5120, num_heads=40, hidden=13824),
    "gpt-30b": GPTConfig(num_layers=56, width=6656, num_heads=52, hidden=17920),
    "gpt-70b": GPTConfig(num_layers=72, width=8192, num_heads=64, hidden=28672),
})  # fmt: skip


def preset(name: str) -> GPTConfig:
    """Return the preset of that name. Raises ConfigError naming the nearest known one."""
    try:
        return PRESETS[name]
    except KeyError:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--model: {name!r} is no preset.", remedy=f"{hint}Known: {', '.join(PRESETS)}.") from None


def parameter_count(config: GPTConfig) -> int:
    """Return the exact number of parameters: embedding, blocks, final norm, untied head."""
    block = 4 * config.width**2 + 3 * config.width * config.hidden + 2 * config.width
    return 2 * config.vocab_size * config.width + config.num_layers * block + config.width


def block_kept_bytes(config: GPTConfig, *, micro_batch_size: int, seq_len: int, dtype_bytes: int) -> int:
    """Return what autograd keeps of one block for one micro-batch when the block is not rerun, in bytes.

    Fused attention keeps no scores, so the sequence length counts once; the two norms keep four fp32 tensors.
    """
    num_tokens = micro_batch_size * seq_len
    return num_tokens * ((9 * config.width + 4 * config.hidden) * dtype_bytes + 16 * config.width)


def activation_bytes(
    config: GPTConfig, *, micro_batch_size: int, seq_len: int, num_micro_batches: int, dtype_bytes: int
) -> int:
    """Estimate the most that activations and their gradients take at one time when every block is rerun, in bytes.

    `num_micro_batches` is how many are under way together: A in vertical order, 1 in horizontal. Counts the kept inputs of
    every unit, the gradients at one border, and the larger of one block's rerun with its backward and the tail (norm, head,
    loss); not the gathered weights and their gradients. The factors follow the profiler's peaks on the CPU.
    """
    num_tokens = micro_batch_size * seq_len
    border = num_tokens * config.width * dtype_bytes
    kept = num_micro_batches * (config.num_layers + 2) * border
    block = block_kept_bytes(config, micro_batch_size=micro_batch_size, seq_len=seq_len, dtype_bytes=dtype_bytes)
    in_backward = 2 * num_tokens * config.hidden * dtype_bytes
    tail = num_tokens * (18 * config.vocab_size + 16 * config.width)
    return kept + max(block + in_backward, tail)
