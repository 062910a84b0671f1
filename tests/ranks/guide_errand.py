"""One rank of a script whose configuration is a public guide's, as it is but for the directory on NVMe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from kit import TINY_GPT

import infinity as deepspeed


def loop_of_a_guide(values: Mapping[str, Any], nvme: str) -> dict[str, Any]:
    """Take two steps of DeepSpeed's loop; return each step's gradient norm, skips, and how many parameters moved."""
    model = TINY_GPT.build()
    before = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, config=_at(values, nvme), activation_bytes=1 << 22, num_steps=2)
    norms = []
    with engine:
        for step in range(2):
            for micro_batch in range(engine.gradient_accumulation_steps()):
                generator_step = 10 * step + engine.global_rank + engine.world_size * micro_batch
                loss = engine(*TINY_GPT.batches(generator_step, 1, torch.float32)[0])
                engine.backward(loss)
                engine.step()
            norms.append(engine.get_global_grad_norm())
        after = dict(engine.full_parameters())
        moved = sum(not torch.equal(after[name].float(), before[name]) for name in before)
        return {
            "norms": [norm if norm is not None and math.isfinite(norm) else None for norm in norms],
            "moved": moved,
            "skipped": engine.skipped_steps,
            "lr": engine.get_lr(),
            "stage": engine.plan.stage,
            "precision": engine.config.precision,
            "weights": {name: value.double().sum().item() for name, value in after.items()},
        }


def _at(values: Mapping[str, Any], nvme: str) -> dict[str, Any]:
    """Return the configuration with its directories where this test may write."""
    return {
        key: _at(value, nvme) if isinstance(value, Mapping) else nvme if key == "nvme_path" else value
        for key, value in values.items()
    }
