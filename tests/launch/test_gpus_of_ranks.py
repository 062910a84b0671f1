"""GPUs for ranks: one each, or none at all."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.launch.gpus import require_gpus


@pytest.mark.parametrize(("num_gpus", "num_ranks", "asked"), [(0, 2, False), (2, 2, True), (4, 2, False)])
def test_ranks_with_a_gpu_each_or_without_any_may_start(
    num_gpus: int, num_ranks: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough GPUs, or a machine without them where nobody asked for one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    require_gpus(num_ranks, asked=asked)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "asked", "words"),
    [(0, 2, True, "--num-ranks instead"), (1, 2, True, "--num-gpus 1"), (1, 2, False, "CUDA_VISIBLE_DEVICES=")],
)
def test_ranks_without_a_gpu_each_are_refused(
    num_gpus: int, num_ranks: int, asked: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is what this machine can do."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError) as caught:
        require_gpus(num_ranks, asked=asked)
    assert words in caught.value.remedy
