"""Train the job with infinity in a memory budget, its state on NVMe whole or as far as the budget asks for it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from mlp_job import (
    GRADIENT_CLIP,
    LEARNING_RATE,
    NUM_BLOCKS,
    NUM_ROWS,
    WEIGHT_DECAY,
    Job,
    fill_reproducibly,
    fixed_batch,
    print_report,
    run_steps,
)
from torch import nn

import infinity


def configuration(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the configuration for the settings on the command line."""
    return {
        "train_micro_batch_size_per_gpu": NUM_ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": GRADIENT_CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": arguments.stage,
            "offload_optimizer": {"device": arguments.device},
            "offload_param": {"device": arguments.device},
        },
        "infinity": {"nvme": [str(arguments.nvme)], "cpu_memory": arguments.cpu_memory},
    }


def fill_module(module: nn.Module, name: str) -> None:
    """Fill the parameters that a module owns itself."""
    with torch.no_grad():
        for attribute, parameter in module.named_parameters(recurse=False):
            fill_reproducibly(f"{name}.{attribute}", parameter)


def job_options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what the job needs to know."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--cpu-memory", required=True)
    parser.add_argument("--stage", type=int, help="the lowest that fits unless given")
    parser.add_argument("--device", choices=("auto", "nvme"), required=True, help="of optimizer state and parameters")
    return parser


def open_job(arguments: argparse.Namespace) -> infinity.Engine:
    """Return the engine that trains the job."""
    with torch.device("meta"):
        model = Job(arguments.blocks).bfloat16()
    return infinity.initialize(model=model, config=configuration(arguments), init=fill_module).engine


def main() -> None:
    """Train for `--steps` steps and print the report."""
    parser = job_options(__doc__)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()

    rows, target = fixed_batch()
    with open_job(arguments) as engine:
        num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
        notes = {
            "infinity": infinity.__version__, "torch": torch.__version__, "configuration": configuration(arguments),
            "traffic": [asdict(line) for line in engine.plan.traffic],
        }  # fmt: skip
        report = run_steps(arguments.steps, lambda: engine.train_batch([(rows, target)]).loss, num_parameters, notes)
        engine.synchronize()
    print_report(report)


if __name__ == "__main__":
    main()
