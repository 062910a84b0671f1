"""The arithmetic of the native Adam in plain torch operations, on any device; docs/numerics.md explains it.

Every operation is rounded by itself: fused ones (lerp, addcmul, addcdiv) are contracted to FMA by some back ends. Scalars
are fp32 tensors of the same device, because CUDA turns the division by a Python number into a multiplication. The square
root is taken in fp64 and then rounded, because the vector library behind torch.sqrt on CPU is one ulp off now and then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.optim.hyper import AdamHyper

_INFINITY_BITS = 0x7F800000
_QUIET_NAN_BITS = 0x7FC00000
_LARGEST_SPLIT_BITS = 0x7F7F7FFF
_MAGNITUDE = 0x7FFFFFFF


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fp32 `master` as (bf16 weights, int16 low halves), of the same shape.

    Half-up on the bit patterns, so `join_master` returns the same bits; only finite values that would round to infinity
    are clamped to the largest that does not, and every NaN becomes the quiet one.
    """
    bits = master.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    held = torch.where(magnitude < _INFINITY_BITS, magnitude.clamp(max=_LARGEST_SPLIT_BITS), magnitude)
    held = torch.where(magnitude > _INFINITY_BITS, _QUIET_NAN_BITS, held) | (bits & ~_MAGNITUDE)
    high = (held + 0x8000) >> 16  # int32 wraps around, as the bijection wants it
    low = held - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(weights: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 master of bf16 `weights` and int16 `low`, of the same shape."""
    high = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def adam_update_(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, hyper: AdamHyper, coefficient: float = 1.0
) -> None:
    """Make one Adam update in place. All tensors have one shape; all but `grad` are fp32."""
    scalars = hyper.scalars()
    weight = _scalar(scalars.lerp_weight, master)
    scaled = grad.float() * _scalar(coefficient, master)
    master.mul_(_scalar(scalars.decay, master))
    if scalars.l2 != 0:
        scaled = scaled + master * _scalar(scalars.l2, master)
    change = scaled - exp_avg
    if weight < 0.5:
        exp_avg.add_(change * weight)
    else:
        exp_avg.copy_(scaled + change * (weight - 1))
    exp_avg_sq.mul_(_scalar(scalars.beta2, master))
    exp_avg_sq.add_(scaled * _scalar(scalars.square_weight, master) * scaled)
    denominator = exp_avg_sq.double().sqrt().float() / _scalar(scalars.root_correction, master) + _scalar(
        scalars.eps, master
    )
    master.add_(exp_avg * _scalar(scalars.step_size, master) / denominator)


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)
