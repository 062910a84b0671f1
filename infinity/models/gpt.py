"""A pre-norm decoder: RMSNorm, rotary positions, causal attention, SwiGLU; byte vocabulary by default.

Shape suffixes: B micro-batch size, T sequence length, D width, H heads, E head width, F SwiGLU width, V vocabulary.
Nothing here knows where parameters live: the model is made on any device, meta included, and holds no buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infinity.models.presets import GPTConfig

_INIT_STD = 0.02
_INIT_CHUNK_ELEMENTS = 1 << 20
# Ends of the names of the two matrices that write into the residual stream.
_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


def rotary_tables(length: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, E/2] in the dtype and on the device of `like` (Su et al., 2021)."""
    exponents_e = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    positions_t = torch.arange(length, device=like.device, dtype=torch.float32)
    angles_te = torch.outer(positions_t, base**-exponents_e)
    return angles_te.cos().to(like.dtype), angles_te.sin().to(like.dtype)


def rotate(x_bhte: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
    """Rotate each pair (element i, element i + E/2) by its position's angle."""
    first, second = x_bhte.chunk(2, dim=-1)
    return torch.cat((first * cos_te - second * sin_te, second * cos_te + first * sin_te), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        qkv_bt3he = self.qkv(x_btd).unflatten(-1, (3, self.num_heads, -1))
        q_bhte, k_bhte, v_bhte = qkv_bt3he.permute(2, 0, 3, 1, 4).unbind(0)
        y_bhte = F.scaled_dot_product_attention(
            rotate(q_bhte, cos_te, sin_te), rotate(k_bhte, cos_te, sin_te), v_bhte, is_causal=True
        )
        return self.out(y_bhte.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer, 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        gate_btf, up_btf = self.gate_up(x_btd).chunk(2, dim=-1)
        return self.down(F.silu(gate_btf) * up_btf)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block: the unit that offloading moves."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), cos_te, sin_te)
        return x_btd + self.mlp(self.mlp_norm(x_btd))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The decoder. Embedding and head are not tied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], or with `targets` [B, T] the mean cross-entropy in nats, fp32.

        `tokens` is int64 [B, T].
        """
        x_btd = self.embed(tokens)
        cos_te, sin_te = rotary_tables(tokens.shape[1], self.config.head_dim, self.config.rotary_base, x_btd)
        for block in self.blocks:
            x_btd = block(x_btd, cos_te, sin_te)
        logits_btv = self.head(self.norm(x_btd))
        if targets is None:
            return logits_btv  # type: ignore[no-any-return]
        return F.cross_entropy(logits_btv.float().flatten(0, 1), targets.flatten())


def build_meta_gpt(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """Return the model on the meta device: shapes and dtypes only, no memory."""
    with torch.device("meta"):
        return GPT(config).to(dtype)


def parameter_initializer(config: GPTConfig, seed: int) -> Callable[[nn.Module, str], None]:
    """Return `init(module, name)`, which fills the parameters below `module`, known in the model as `name`.

    A parameter's values depend on (seed, its full name, its size) alone, so they are the same in any order, unit by
    unit or at once, and on any device. Peak memory above the parameter itself is 4 MiB.
    """
    residual_std = _INIT_STD / (2 * config.num_layers) ** 0.5

    def init(module: nn.Module, name: str) -> None:
        for local_name, parameter in module.named_parameters():
            full_name = f"{name}.{local_name}" if name else local_name
            if full_name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                std = residual_std if full_name.endswith(_RESIDUAL_OUTPUTS) else _INIT_STD
                _fill_normal(parameter, std, _generator(seed, full_name))

    return init


def _generator(seed: int, name: str) -> torch.Generator:
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def _fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw in fp32 on the CPU, a piece at a time, and round to the parameter's dtype."""
    flat = parameter.view(-1)
    for start in range(0, flat.numel(), _INIT_CHUNK_ELEMENTS):
        piece = flat[start : start + _INIT_CHUNK_ELEMENTS]
        piece.copy_(torch.empty(piece.numel(), dtype=torch.float32).normal_(0.0, std, generator=generator))
