"""Ranks as processes over a TCP store: they meet, sum, and notice that one was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from infinity.comm.local import Local
from infinity.comm.open_group import meet
from infinity.errors import ConfigError

SIZE = 3
ROOT = Path(__file__).resolve().parents[2]


def test_three_processes_work_together_and_two_survive_the_third() -> None:
    """Sums agree, also of the calls that NCCL serves; a killed rank is an error with exit code 8 elsewhere (C40, C131)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, which outlives each rank
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_process.py"))],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            | {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any("Warning" in stderr for _, stderr in outputs), outputs
    assert [rank.returncode for rank in ranks] == [8, -signal.SIGKILL, 8], outputs
    for rank, (stdout, _) in enumerate(outputs):
        said = [json.loads(line) for line in stdout.splitlines()]
        assert said[0] == {"sum": [6.0] * 6, "backend": "gloo"}
        total = [30.0 + 3 * element for element in range(6)]
        assert said[1] == {
            "whole": total,
            "everywhere": total,
            "source": [20.0 + element for element in range(6)],
            "done": True,
        }
        if rank != 1:
            assert "Rank 1 is dead" in said[2]["error"]
            assert "step 9" in said[2]["error"]
            assert "MiB resident" in said[2]["error"]


def test_one_rank_needs_no_rendezvous() -> None:
    """Without a launcher, and with one that starts one rank, there is nobody to meet."""
    assert meet({}) is None
    assert meet({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert Local().size == 1


def test_an_environment_that_is_not_whole_names_what_is_missing() -> None:
    """Every variable that is missing or wrong is named at once."""
    with pytest.raises(ConfigError, match=r"RANK is missing; MASTER_ADDR is missing; MASTER_PORT is 'x'"):
        meet({"WORLD_SIZE": "2", "MASTER_PORT": "x"})
