"""Train the job with DeepSpeed ZeRO-3, optimizer on NVMe, parameters in RAM; runs inside its own virtual environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
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


def configuration(arguments: argparse.Namespace) -> dict[str, object]:
    """Return DeepSpeed's configuration for the settings on the command line."""
    return {
        "train_micro_batch_size_per_gpu": NUM_ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": GRADIENT_CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": arguments.sub_group_size,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(arguments.nvme),
                "buffer_count": arguments.buffer_count,
                "pipeline_read": arguments.pipeline,
                "pipeline_write": arguments.pipeline,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


def main() -> None:
    """Train for `--steps` steps and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--buffer-count", type=int, required=True)
    parser.add_argument("--sub-group-size", type=int, required=True)
    parser.add_argument("--pipeline", action="store_true")
    arguments = parser.parse_args()

    config = configuration(arguments)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Job(arguments.blocks)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            fill_reproducibly(name, parameter)
    num_parameters = sum(parameter.ds_numel for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rows, target = fixed_batch()

    def step() -> float:
        loss = engine(rows, target)
        engine.backward(loss)
        engine.step()
        return loss.item()

    notes: dict[str, object] = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "configuration": config}
    print_report(run_steps(arguments.steps, step, num_parameters, notes))


if __name__ == "__main__":
    main()
