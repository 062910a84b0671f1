"""One rank of a job whose units take long: when each collective was under way, and when each unit ran."""

from __future__ import annotations

from typing import Any

import torch
from slow_units import WIDTH, SlowModel

import infinity


def train_slowly() -> dict[str, Any]:
    """Take a few steps in stage 3; return the last one's runs of units, and its collectives by what they moved."""
    log: list[tuple[int, int, int]] = []
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "infinity": {"weight_slots": 3},
    }
    torch.manual_seed(0)
    with infinity.initialize(model=SlowModel(log), config=config, activation_bytes=1 << 20).engine as engine:
        for _ in range(2):
            engine.train_batch([torch.randn(2, WIDTH)])
        engine.synchronize()
        log.clear()
        begin = engine.recorder.now_ns()
        engine.train_batch([torch.randn(2, WIDTH)])
        spans = [span for span in engine.recorder.spans() if span.name == "comm.exchange" and span.start_ns > begin]
    moved = [(str(span.attributes["what"]), span.start_ns, span.end_ns) for span in spans]
    return {"runs": list(log), "moved": moved}
