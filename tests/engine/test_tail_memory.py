"""The memory of logits and losses does not grow with the number of micro-batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VOCABULARY, SEQUENCE = 32_000, 512

SCRIPT = """
import sys
import torch
from torch import nn
import infinity
from infinity.memory.base import measure_base
from infinity.memory.host_allocator import tune_host_allocator
from infinity.memory.limits import rss_bytes

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x).float()
        peaks.append(rss_bytes())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        peaks.append(rss_bytes())
        return loss

VOCABULARY, SEQUENCE, num = map(int, sys.argv[1:4])
tune_host_allocator()
base, peaks = measure_base(), []
config = {
    "gradient_accumulation_steps": num, "bf16": {"enabled": True},
    "zero_optimization": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "infinity": {"nvme": [sys.argv[4]], "cpu_memory": "1GiB"},
}
with infinity.initialize(model=Model(), config=config).engine as engine:
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE))
        engine.train_batch([(tokens, tokens)] * num)
print(max(peaks) - base)
"""


def peak_bytes(num_micro_batches: int, directory: Path) -> int:
    """Return the most that the process takes above its base while logits are alive."""
    command = [sys.executable, "-c", SCRIPT, *map(str, (VOCABULARY, SEQUENCE, num_micro_batches, directory))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_tail_memory_does_not_depend_on_the_number_of_micro_batches(nvme: Path) -> None:
    """At a vocabulary of 32,000 and 512 tokens, sixteen micro-batches take at most a tenth more than one."""
    one, sixteen = peak_bytes(1, nvme), peak_bytes(16, nvme)
    logits_bytes = VOCABULARY * SEQUENCE * 4
    assert one > logits_bytes
    assert sixteen <= 1.1 * one
