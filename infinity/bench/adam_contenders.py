"""What the Adam benchmark compares on the same buffers: our kernels, the bare loop over the same bytes, torch.optim."""

from __future__ import annotations

from functools import partial

import torch

from infinity.bench.adam_data import AdamData
from infinity.bench.adam_paths import AdamPath
from infinity.bench.rounds import Contender
from infinity.optim.hyper import AdamHyper
from infinity.optim.kernel import AdamKernel

LIMIT = "limit"
TORCH_FUSED, TORCH_FOREACH = "torch_fused", "torch_foreach"

# In the middle of a run, and with a gradient that is clipped.
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1000, decoupled=True)
COEFFICIENT = 0.5


def limit(kernel: AdamKernel, path: AdamPath, data: AdamData) -> Contender:
    """Return the bare loop: every stream is read, the written ones are written, nothing is computed."""
    arguments = (path.master, path.grad_dtype, data.num_parameters, data.arrays(path))
    return Contender(LIMIT, partial(kernel.move_bytes, *arguments))


def ours(kernel: AdamKernel, path: AdamPath, data: AdamData, num_parameters: int | None = None) -> Contender:
    """Return one update of all parameters, or of the first `num_parameters`, by our kernel."""
    arguments = (path.master, path.grad_dtype, num_parameters or data.num_parameters, data.arrays(path))
    return Contender(kernel.name, partial(kernel.adam_update, *arguments, HYPER, COEFFICIENT))


def torch_adamw(path: AdamPath, data: AdamData, *, fused: bool) -> Contender:
    """Return a step of torch.optim.AdamW, fused or foreach, on the path's own buffers: fp32, for torch has no other path."""
    parameter = torch.nn.Parameter(data.tensor(path, "weights"))
    parameter.grad = data.tensor(path, "grad")
    optimizer = torch.optim.AdamW(
        [parameter], lr=HYPER.lr, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps, weight_decay=HYPER.weight_decay,
        fused=fused, foreach=not fused,
    )  # fmt: skip
    optimizer.state[parameter] = {
        "step": torch.tensor(float(HYPER.step)),
        "exp_avg": data.tensor(path, "exp_avg"),
        "exp_avg_sq": data.tensor(path, "exp_avg_sq"),
    }
    return Contender(TORCH_FUSED if fused else TORCH_FOREACH, optimizer.step)
