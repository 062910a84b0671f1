"""Time what the job computes by itself, as training does it but with all weights in RAM: no disk, no optimizer."""

from __future__ import annotations

import argparse
import json
import time

import torch
from mlp_job import NUM_BLOCKS, Block, Job, fixed_batch
from torch import Tensor

from infinity.memory.host_allocator import tune_host_allocator
from infinity.optim.kernel import AdamKernel, GradientRun, open_kernel


def timed_forward(job: Job, rows: Tensor) -> tuple[float, list[Tensor]]:
    """Return the seconds of a forward pass that keeps nothing but the inputs of blocks, and these."""
    begin, inputs = time.perf_counter(), []
    with torch.no_grad():
        for block in job.blocks:
            inputs.append(rows)
            rows = block(rows)
    return time.perf_counter() - begin, inputs


def timed_backward(job: Job, inputs: list[Tensor], kernel: AdamKernel, into: Tensor) -> float:
    """Return the seconds of a backward pass: each block is run again, and its gradient is rounded into its place."""
    begin = time.perf_counter()
    grad = torch.ones_like(inputs[0])
    for block, rows in zip(reversed(job.blocks), reversed(inputs), strict=True):
        entered = rows.detach().requires_grad_()
        block(entered).backward(grad)
        kernel.round_gradient(gradient_runs(block), into.data_ptr(), into.numel(), "bfloat16")
        block.zero_grad(set_to_none=True)
        grad = entered.grad
    return time.perf_counter() - begin


def gradient_runs(block: Block) -> list[GradientRun]:
    """Return the gradients of a block's parameters, one behind the other."""
    runs: list[GradientRun] = []
    for parameter in block.parameters():
        start = runs[-1].start + runs[-1].length if runs else 0
        runs.append(GradientRun(start, parameter.numel(), parameter.grad.data_ptr(), "bfloat16"))
    return runs


def main() -> None:
    """Run `--rounds` passes after one that is not counted, and print the seconds of each as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    rows, _ = fixed_batch()
    tune_host_allocator()  # after the batch was made, as in infinity_mlp.py: no huge pages
    job, kernel = Job(arguments.blocks).bfloat16(), open_kernel()
    into = torch.zeros(sum(parameter.numel() for parameter in job.blocks[0].parameters()), dtype=torch.bfloat16)
    forward, backward = [], []
    for _ in range(1 + arguments.rounds):
        seconds, inputs = timed_forward(job, rows)
        forward.append(seconds)
        backward.append(timed_backward(job, inputs, kernel, into))
    print(json.dumps({"forward_seconds": forward[1:], "backward_seconds": backward[1:]}), flush=True)


if __name__ == "__main__":
    main()
