"""Runs that measure a rank: what its ledger holds, what crosses between ranks, how large its process gets."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kit import Bulk, compute_dtype, finish_ahead, open_engine
from torch import nn

from infinity.placement.plan import Link

WARM_UP_STEPS, NUM_STEPS = 2, 2
SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Sizes:
    """What one rank measured."""

    peaks: Mapping[str, int]  # by owner, over tiers, in the ledger
    planned: Mapping[str, int]  # the same in the plan
    counters: Mapping[str, int]  # of NUM_STEPS steady steps together
    planned_traffic: Mapping[str, int]  # between ranks in one step, by what it is


def train_bulk(config: Mapping[str, Any], width: int, num_layers: int) -> Sizes:
    """Train a stack of layers and measure steady steps; at both ends everything that is taken ahead has come in."""
    with open_engine(Bulk(width=width, num_layers=num_layers), config) as engine:
        num_micro_batches = config["gradient_accumulation_steps"]

        def take_steps(num_steps: int) -> None:
            generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
            for _ in range(num_steps):
                rows = torch.randn(num_micro_batches, 2, width, generator=generator).to(compute_dtype(config))
                engine.train_batch(list(rows))
                finish_ahead(engine)

        take_steps(WARM_UP_STEPS)
        before = dict(engine.recorder.counters())
        take_steps(NUM_STEPS)
        counted = {name: total - before.get(name, 0) for name, total in engine.recorder.counters().items()}
        peaks: dict[str, int] = defaultdict(int)
        for line in engine.memory_report():
            peaks[line.owner] += line.peak_bytes
        planned: dict[str, int] = defaultdict(int)
        for planned_line in engine.plan.memory:
            planned[planned_line.owner.value] += planned_line.num_bytes
        links = {line.what: line.expected_bytes for line in engine.plan.links if line.link is Link.RANKS}
        return Sizes(dict(peaks), dict(planned), counted, links)


def pss_bytes() -> int:
    """Return this process's proportional set: pages that several processes share count in parts."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def load_bulk(config: Mapping[str, Any], width: int, num_layers: int) -> int:
    """Make an engine for a model on meta, filled module by module, take a step; return the most PSS above the start."""
    peak, done = pss_bytes(), threading.Event()
    base = peak

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, pss_bytes())
            time.sleep(SAMPLE_SECONDS)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with torch.device("meta"):
            model = Bulk(width=width, num_layers=num_layers)
        with open_engine(model, config, init=fill) as engine:
            engine.train_batch([torch.ones(2, width).bfloat16()])
    finally:
        done.set()
        watching.join()
    return peak - base


def fill(module: nn.Module, name: str) -> None:
    """Give the parameters that a module owns itself their first values."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.01)
