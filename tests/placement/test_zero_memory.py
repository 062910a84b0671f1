"""ZeRO's memory as the literature counts it, and as the incumbent's estimators do."""

from __future__ import annotations

import pytest

from infinity.byte_sizes import GIB
from infinity.placement.stages import PARTITIONED
from infinity.placement.zero_memory import estimate_zero2_needs, estimate_zero3_needs, state_bytes, textbook_bytes
from infinity.states import StateKind


def test_the_textbook_tables_come_out() -> None:
    """7.5 B parameters on 64 ranks take 120 / 31.4 / 16.6 / 1.9 GB, 7 B on 8 ranks 112 / 38.5 / 26.25 / 14 GB."""
    large = [textbook_bytes(7_500_000_000, stage, 64).total / 1e9 for stage in PARTITIONED]
    assert [round(figure, 1) for figure in large] == [120.0, 31.4, 16.6, 1.9]
    small = [textbook_bytes(7_000_000_000, stage, 8).total / 1e9 for stage in PARTITIONED]
    assert small == [112.0, 38.5, 26.25, 14.0]


def test_a_stage_divides_what_the_table_says() -> None:
    """Optimizer bytes fall as 1/N from stage 1, gradients from 2, weights from 3; one rank has everything in every stage."""
    found = [
        state_bytes(1000, stage, 4, {StateKind.PARAM: 2, StateKind.GRAD: 2, StateKind.OPTIM: 10}) for stage in PARTITIONED
    ]
    assert [one.optim for one in found] == [10_000, 2500, 2500, 2500]
    assert [one.grads for one in found] == [2000, 2000, 500, 500]
    assert [one.params for one in found] == [2000, 2000, 2000, 500]
    assert {textbook_bytes(1000, stage, 1).total for stage in PARTITIONED} == {16_000}


def test_stage_2_needs_are_the_incumbents() -> None:
    """T5-3B on one node of 8 GPUs: 127.48 GB of host memory and 5.31 GB of each GPU with offload, 2P + 18P/8 without."""
    num_parameters = 2_851_598_336
    needs = estimate_zero2_needs(num_parameters, num_gpus_per_node=8)
    assert (round(needs.cpu_bytes / GIB, 2), round(needs.gpu_bytes / GIB, 2)) == (127.48, 5.31)
    without = estimate_zero2_needs(num_parameters, num_gpus_per_node=8, cpu_offload=False)
    assert (without.cpu_bytes, without.gpu_bytes) == (num_parameters * 48, 2 * num_parameters + num_parameters * 18 // 8)
    assert estimate_zero2_needs(100, num_gpus_per_node=2, additional_buffer_factor=1.0).cpu_bytes == 1600
    assert estimate_zero2_needs(100, num_gpus_per_node=4, num_nodes=2, additional_buffer_factor=1.0).cpu_bytes == 3200


@pytest.mark.parametrize(("offload", "offload_params", "zero_init", "expected"), [
    (True, True, True, (71.71, 0.12)),
    (True, True, False, (127.48, 0.12)),
    (True, False, True, (63.74, 0.79)),
    (True, False, False, (127.48, 0.79)),
    (False, False, True, (1.47, 6.1)),
    (False, False, False, (127.48, 6.1)),
])  # fmt: skip
def test_stage_3_needs_are_the_incumbents(
    offload: bool, offload_params: bool, zero_init: bool, expected: tuple[float, float]
) -> None:
    """T5-3B, whose largest layer has 32.9 M parameters, on one node of 8 GPUs, in the six rows of the incumbent's table."""
    needs = estimate_zero3_needs(
        2_851_598_336, 32_899_072, num_gpus_per_node=8,
        cpu_offload=offload, cpu_offload_params=offload_params, zero_init=zero_init,
    )  # fmt: skip
    assert needs.largest_layer_bytes == 4 * 32_899_072
    assert (round(needs.cpu_bytes / GIB, 2), round(needs.gpu_bytes / GIB, 2)) == expected
