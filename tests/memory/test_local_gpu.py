"""Which GPU is a rank's."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.memory.device import take_local_gpu


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that this machine has three GPUs; what was made the current one."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_each_rank_of_a_machine_takes_a_gpu_of_its_own(chosen: list[int]) -> None:
    """The GPU with the rank's number on this machine becomes the current one; a rank too many is refused."""
    for local_rank in range(3):
        take_local_gpu(local_rank)
    assert chosen == [0, 1, 2]
    with pytest.raises(ConfigError, match="LOCAL_RANK 3 has no GPU: torch finds 3 here"):
        take_local_gpu(3)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_rank_that_sees_one_gpu_keeps_it(num_gpus: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launcher shows each rank its own GPU alone, or there is none, nothing is chosen."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    take_local_gpu(1)
    assert chosen == []
