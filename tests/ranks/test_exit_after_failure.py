"""How a script ends that never closes its engine, when one of its ranks has failed."""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist
from rank_pool import launcher_variables

SCRIPT = """
import os
import torch
import infinity

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
engine = infinity.initialize(model=model, config=config, activation_bytes=1 << 20).engine
for step in range(3):
    if step == 2 and os.environ["RANK"] == "1":
        raise ValueError("this rank has no more data")
    loss = engine(torch.randn(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
"""


def test_the_other_rank_ends_with_the_error_and_not_with_an_abort() -> None:
    """Rank 0 quotes the exception of rank 1, and both end with Python's own exit code, not with SIGABRT (C130)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **launcher_variables(rank, 2, store.port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "CommError" in said[0]
    assert "this rank has no more data" in said[0]
    assert "terminate called" not in said[0] + said[1]
