"""Time Adam updates in turn in one process: ours, the bare loop, torch's, DeepSpeed's; runs in DeepSpeed's environment."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from infinity.bench.adam_contenders import COEFFICIENT, HYPER, limit, ours, torch_adamw
from infinity.bench.adam_data import AdamData, open_adam_data_arena
from infinity.bench.adam_paths import PATHS, AdamPath
from infinity.bench.rounds import Contender, time_in_turn
from infinity.memory.arena import open_arena
from infinity.memory.ledger import Ledger
from infinity.optim.kernel import open_kernel
from infinity.states import Tier

FP32, SPLIT = (next(path for path in PATHS if path.name == name) for name in ("fp32", "bf16_split"))


@dataclass
class Half:
    """The bf16 gradient and weights of DeepSpeed's job; master, moments and the fp32 gradient are those of the fp32 path."""

    grad: torch.Tensor
    weights: torch.Tensor


def deepspeed_fp32(data: AdamData) -> Contender:
    """Return a step of DeepSpeedCPUAdam on the fp32 buffers."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(data.tensor(FP32, "weights"))
    parameter.grad = data.tensor(FP32, "grad")
    optimizer = DeepSpeedCPUAdam(
        [parameter], lr=HYPER.lr, betas=(HYPER.beta1, HYPER.beta2), eps=HYPER.eps, weight_decay=HYPER.weight_decay
    )
    optimizer.state[parameter] = {
        "step": HYPER.step,
        "exp_avg": data.tensor(FP32, "exp_avg"),
        "exp_avg_sq": data.tensor(FP32, "exp_avg_sq"),
    }
    return Contender("deepspeed_fp32", optimizer.step)


def deepspeed_bf16(step: Contender, data: AdamData, half: Half) -> Contender:
    """Return the passes that ZeRO-Offload makes for a bf16 model: cast, unscale and clip, CPU Adam, copy back."""
    grad, master = data.tensor(FP32, "grad"), data.tensor(FP32, "weights")

    def passes() -> None:
        grad.copy_(half.grad)
        grad.mul_(COEFFICIENT)
        step.run()
        half.weights.copy_(master)

    return Contender("deepspeed_bf16", passes)


def open_data(path: AdamPath, num_parameters: int, resources: ExitStack) -> AdamData:
    """Return filled buffers for one path."""
    data = AdamData(resources.enter_context(open_adam_data_arena(num_parameters, (path,))).buffer, num_parameters)
    data.fill(path)
    return data


def open_half(num_parameters: int, resources: ExitStack) -> Half:
    """Return DeepSpeed's two bf16 buffers, on huge pages as all the others."""
    arena = open_arena(4 * num_parameters, ledger=Ledger({}), tier=Tier.CPU, owner="bf16 buffers", pin=False)
    buffer = resources.enter_context(arena).buffer
    grad, weights = (buffer.tensor(torch.bfloat16, num_parameters, 2 * num_parameters * part) for part in range(2))
    return Half(grad.normal_(std=1e-3), weights)


def main() -> None:
    """Print the seconds of every round as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--ours-alone", action="store_true", help="without torch and DeepSpeed")
    arguments = parser.parse_args()
    kernel = open_kernel()
    with ExitStack() as resources:
        full = open_data(FP32, arguments.parameters, resources)
        split = open_data(SPLIT, arguments.parameters, resources)
        contenders = [
            replace(limit(kernel, FP32, full), name="limit_fp32"),
            replace(ours(kernel, FP32, full), name="ours_fp32"),
            replace(limit(kernel, SPLIT, split), name="limit_bf16"),
            replace(ours(kernel, SPLIT, split), name="ours_bf16"),
        ]
        if not arguments.ours_alone:
            torch.set_num_threads(kernel.num_threads)
            step = deepspeed_fp32(full)
            half = open_half(arguments.parameters, resources)
            contenders += [
                torch_adamw(FP32, full, fused=True),
                torch_adamw(FP32, full, fused=False),
                step,
                deepspeed_bf16(step, full, half),
            ]
        timings = time_in_turn(contenders, arguments.rounds)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    print(json.dumps({"kernel": kernel.name, "threads": kernel.num_threads, "seconds": seconds}))


if __name__ == "__main__":
    main()
