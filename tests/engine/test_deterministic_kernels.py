"""`infinity.deterministic` lets torch choose deterministic kernels only, for as long as the engine lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same, settings, train


@pytest.mark.parametrize("before", [False, True])
def test_the_setting_lives_as_long_as_the_engine(before: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On inside, as it was after close; cuBLAS gets its workspace unless the user chose one."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with open_engine(TINY_GPT.build(), settings(nvme, deterministic=True)):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.is_deterministic_algorithms_warn_only_enabled() is before
        with open_engine(TINY_GPT.build(), settings(nvme)):
            assert torch.are_deterministic_algorithms_enabled() is before
    finally:
        torch.use_deterministic_algorithms(False)


def test_on_the_cpu_it_changes_no_bit(nvme: Path) -> None:
    """The CPU's kernels are deterministic already."""
    require_same(train(TINY_GPT, settings(nvme, deterministic=True)), train(TINY_GPT, settings(nvme)))
