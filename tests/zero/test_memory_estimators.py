"""The estimators under ZeRO's names: a row for each option, with the figures of the known formulas."""

from __future__ import annotations

import re

import torch
from torch import nn

import infinity

GIB = 1 << 30


def rows(table: str) -> list[tuple[float, float, str]]:
    """Return (GiB per CPU, GiB per GPU, options) of each row."""
    return [
        (float(cpu), float(gpu), words) for cpu, gpu, words in re.findall(r"([\d.]+) GiB \| +([\d.]+) GiB \| (.*)", table)
    ]


def test_stage_2_by_count() -> None:
    """8 GPUs, 3 GiB of parameters: 2P and 1.5 P max(4 GPUs, 16) with offload, 2P + 18P/N and 6P x 4 without."""
    found = rows(infinity.zero.estimate_zero2_model_states_mem_needs_all_cold(3 * GIB, 8, 1))
    assert found == [(144.0, 6.0, "offload_optimizer=cpu"), (144.0, 12.75, "offload_optimizer=none")]


def test_stage_3_by_count() -> None:
    """1 GPU, 1 GiB of parameters, a largest layer of a quarter: 18P or 16P x 1.5 on the CPU, 4 layers on the GPU."""
    found = rows(infinity.zero.estimate_zero3_model_states_mem_needs_all_cold(GIB, GIB // 4))
    assert found[0] == (27.0, 1.0, "offload_param=cpu, offload_optimizer=cpu, zero_init=1")
    assert found[2] == (24.0, 3.0, "offload_param=none, offload_optimizer=cpu, zero_init=1")
    assert found[4] == (1.5, 19.0, "offload_param=none, offload_optimizer=none, zero_init=1")
    assert len(found) == 6


def test_a_live_model_is_its_counts() -> None:
    """Tied parameters count once, a layer is what one module holds itself; a model on the meta device will do."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(60_000, 512), nn.Linear(512, 512, bias=False), nn.Linear(512, 60_000, bias=False))
    model[2].weight = model[0].weight
    largest, total = 60_000 * 512, 60_000 * 512 + 512 * 512
    zero = infinity.zero
    assert zero.estimate_zero3_model_states_mem_needs_all_live(
        model, 2
    ) == zero.estimate_zero3_model_states_mem_needs_all_cold(total, largest, 2)
    assert zero.estimate_zero2_model_states_mem_needs_all_live(
        model, 2
    ) == zero.estimate_zero2_model_states_mem_needs_all_cold(total, 2)
