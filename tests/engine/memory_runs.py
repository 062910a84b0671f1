"""Trains bulk models in processes of their own and prints what memory they held: run by test_memory_budget.

Each run is a fork of this process, which has imported torch and nothing else: what was warmed up before is everybody's base.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from kit import Bulk, open_engine, settings

from infinity.memory.limits import peak_rss_bytes, reset_peak_rss, rss_bytes
from infinity.states import Tier

NUM_MICRO_BATCHES = 2
# What torch takes inside a unit of a width of 768, the scratch of its bf16 kernels included; generous.
ACTIVATION_BYTES = 18 << 20


def warm_up(nvme: Path) -> None:
    """A tiny model trained once: after it, torch and infinity have loaded what they need whatever the model is."""
    with open_engine(Bulk(width=64), settings(nvme, optim="nvme", params="nvme")) as engine:
        engine.train_batch([torch.ones(4, 64, dtype=torch.bfloat16)])


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Train and return peaks and samples in bytes above the base."""
    nvme, width, num_steps = Path(asked.pop("nvme")), asked.pop("width"), asked.pop("num_steps")
    warm_up(nvme)
    base = rss_bytes()
    can_reset = reset_peak_rss()
    config = settings(nvme, check=False, num_micro_batches=NUM_MICRO_BATCHES, **asked)
    with torch.device("meta"):
        model = Bulk(width=width)
    samples = []
    with open_engine(model, config, activation_bytes=ACTIVATION_BYTES) as engine:
        after_init = peak_rss_bytes() - base
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            engine.train_batch([torch.randn(4, width, generator=generator).bfloat16() for _ in range(NUM_MICRO_BATCHES)])
            samples.append(rss_bytes() - base)
        ledger = {line.owner: line.peak_bytes for line in engine.memory_report() if line.tier is Tier.CPU}
        plan = engine.plan.memory_bytes(Tier.CPU)
    return {
        "base": base, "init_peak": after_init, "peak": peak_rss_bytes() - base, "samples": samples, "ledger": ledger,
        "plan": plan, "can_reset": can_reset,
    }  # fmt: skip


def in_a_fork(asked: dict[str, Any]) -> dict[str, Any]:
    """Run in a child process and return its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(run(asked), pipe)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        raise SystemExit(f"the run {asked} ended with status {status}")
    result: dict[str, Any] = json.loads(text)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([in_a_fork(asked) for asked in json.loads(sys.argv[1])]))
