"""The job that both sides of the comparisons with DeepSpeed train: model, data, and what a worker reports of itself."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

NUM_BLOCKS = 12
WIDTH = 2048
HIDDEN = 8192
NUM_ROWS = 4
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
GRADIENT_CLIP = 1.0
SEED = 17


class Block(nn.Module):
    """LayerNorm - Linear - GELU - Linear with a residual, 33.6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:  # [B, WIDTH] -> [B, WIDTH]
        return rows + self.down(nn.functional.gelu(self.up(self.norm(rows))))


class Job(nn.Module):
    """Twelve blocks and a mean squared error in fp32; `forward` returns the loss."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:  # both [B, WIDTH]
        for block in self.blocks:
            rows = block(rows)
        return nn.functional.mse_loss(rows.float(), target.float())


def fixed_batch() -> tuple[Tensor, Tensor]:
    """Return the one batch that every step of this rank trains on: rows and target, bf16 [NUM_ROWS, WIDTH]."""
    generator = torch.Generator().manual_seed(SEED + int(os.environ.get("RANK", "0")))
    rows, target = torch.randn(2, NUM_ROWS, WIDTH, generator=generator).bfloat16()
    return rows, target


def fill_reproducibly(name: str, parameter: Tensor) -> None:
    """Fill one parameter with bf16 values that depend on its name alone, so that both sides start from the same weights."""
    if "norm" in name:
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.02).bfloat16())


def peak_rss_bytes() -> int:
    """Return the largest resident set this process has had: VmHWM of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def device_bytes() -> tuple[int, int]:
    """Return the bytes this process has caused to be read from and written to devices: /proc/self/io."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


@dataclass(frozen=True)
class WorkerReport:
    """What one worker process says on its last line of output."""

    num_parameters: int
    losses: list[float]
    step_seconds: list[float]
    read_bytes: list[int]  # per step, from devices
    write_bytes: list[int]
    peak_rss_bytes: int  # of the whole process, libraries included
    notes: dict[str, object]


def run_steps(num_steps: int, step: Callable[[], float], num_parameters: int, notes: dict[str, object]) -> WorkerReport:
    """Call `step` (which returns the loss) `num_steps` times and measure each call."""
    losses, seconds, reads, writes = [], [], [], []
    for index in range(num_steps):
        read_before, written_before = device_bytes()
        begin = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begin)
        read_after, written_after = device_bytes()
        reads.append(read_after - read_before)
        writes.append(written_after - written_before)
        print(f"step {index + 1}: loss {losses[-1]:.6f}, {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return WorkerReport(num_parameters, losses, seconds, reads, writes, peak_rss_bytes(), notes)


def print_report(report: WorkerReport) -> None:
    """Print the report as one line of JSON, the last line of the worker's output."""
    print(json.dumps(asdict(report)), flush=True)
