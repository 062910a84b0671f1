"""Options of `bench nvme` become a matrix of jobs; what no engine takes is refused with the option's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic, batches_of, jobs_of
from infinity.byte_sizes import GIB, KIB, MIB
from infinity.errors import ConfigError

HERE = (Path(),)


def test_the_matrix_is_the_product_of_what_was_asked_for() -> None:
    """Every kind of traffic with every block and depth, each once."""
    settings = NvmeSettings(HERE, traffics=(Traffic.READ, Traffic.MIXED), block_bytes=(4096, MIB, MIB), queue_depths=(8, 64))
    assert jobs_of(settings) == tuple(
        Job(traffic, block, depth) for traffic in (Traffic.READ, Traffic.MIXED) for block in (4096, MIB) for depth in (8, 64)
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engine": "libaio"}, "--engine: 'libaio'"),
        ({"block_bytes": (1000,)}, "--block-size: 1000"),
        ({"block_bytes": (2 * GIB,)}, "--block-size"),
        ({"queue_depths": (0,)}, "--queue-depth: 0"),
        ({"queue_depths": (5000,)}, "--queue-depth: 5000"),
        ({"seconds": 0.0}, "--seconds: 0.0"),
        ({"seconds": float("nan")}, "--seconds: nan"),
        ({"long_run_seconds": -1.0}, "--long-run: -1.0"),
        ({"size_bytes": 5000}, "--size: 5000"),
    ],
)
def test_what_no_engine_takes_is_refused(wrong: dict[str, Any], said: str) -> None:
    """The error names the option and the value, and has a remedy."""
    with pytest.raises(ConfigError, match=said) as error:
        jobs_of(NvmeSettings(HERE, **wrong))
    assert error.value.remedy


@pytest.mark.parametrize("block", [4 * KIB, 64 * KIB, 256 * KIB, MIB, 3 * MIB, 4 * MIB, 16 * MIB])
@pytest.mark.parametrize("depth", [1, 16, 32, 64])
def test_the_engine_never_runs_dry(block: int, depth: int) -> None:
    """While one batch is waited for, the others hold at least `queue_depth` blocks; requests are whole blocks."""
    batches = batches_of(Job(Traffic.READ, block, depth))
    assert batches.request_bytes % block == 0
    assert (batches.num_batches - 1) * batches.batch_bytes >= depth * block or depth == 1
    assert batches.num_batches >= 2


def test_small_blocks_go_in_batches_to_random_places() -> None:
    """4 KiB blocks are single requests, `queue_depth` of them in a submission; a MiB is moved as training moves tiles."""
    small, large = Job(Traffic.READ, 4096, 64), Job(Traffic.READ, MIB, 32)
    assert small.is_random
    assert batches_of(small).requests_per_batch == 64
    assert batches_of(small).request_bytes == 4096
    assert not large.is_random
    assert batches_of(large).request_bytes == 8 * MIB
