"""Each collective against its definition, element by element and bit by bit, over 2 and 3 ranks and over one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from rank_threads import on_every_rank, ranks

from infinity.comm.group import SUMMED_DTYPES, Group, minimum
from infinity.comm.local import Local
from infinity.errors import CommError, IllegalTransition
from infinity.telemetry.recorder import Recorder


@pytest.fixture(scope="module", params=[1, 2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    """One group of each size for all tests of this file."""
    if request.param == 1:
        yield [Local()]
    else:
        with ranks(request.param) as opened:
            yield opened


def every(groups: list[Group], job):
    """Run job(group) on every rank at once; raise the first error."""
    results = on_every_rank(len(groups), lambda rank: job(groups[rank]))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaN equals itself here, and 0 differs from -0."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def contribution(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different sizes, so that another order of the sum gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(num_elements, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (num_elements,), generator=generator
    )
    return values.to(dtype)


def summed(size: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The definition: fp32, rank 0 first, rounded once."""
    total = contribution(0, num_elements, dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, num_elements, dtype).float()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_all_gather_puts_every_shard_in_its_place(groups: list[Group], dtype: torch.dtype) -> None:
    """A flat buffer holds the shards in rank order, also where the shard already is a part of it."""
    size, n = len(groups), 37
    whole = torch.arange(size * n).remainder(7).to(dtype)

    def job(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        shard = whole[group.rank * n : (group.rank + 1) * n].clone()
        apart, together = torch.zeros(size * n, dtype=dtype), torch.zeros(size * n, dtype=dtype)
        own = together[group.rank * n : (group.rank + 1) * n]
        own.copy_(shard)
        first = group.all_gather(shard, apart, what="apart")
        second = group.all_gather(own, together, what="together")
        second.wait()
        first.wait()
        first.wait()
        assert first.done()
        return apart, together

    for apart, together in every(groups, job):
        assert torch.equal(apart, whole)
        assert torch.equal(together, whole)


@pytest.mark.parametrize("dtype", SUMMED_DTYPES, ids=str)
@pytest.mark.parametrize("shard_elements", [1, 1000, 530_001])
def test_sums_are_made_in_rank_order_and_rounded_once(groups: list[Group], dtype: torch.dtype, shard_elements: int) -> None:
    """reduce_scatter and all_reduce have the bits of the definition for every shard and cut, also in place (C13)."""
    size = len(groups)
    expected = summed(size, size * shard_elements, dtype)

    def job(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = slice(group.rank * shard_elements, (group.rank + 1) * shard_elements)
        flat = contribution(group.rank, size * shard_elements, dtype)
        in_place, everywhere = flat.clone(), flat.clone()
        apart = torch.empty(shard_elements, dtype=dtype)
        handles = [
            group.reduce_scatter(flat, apart, what="apart"),
            group.reduce_scatter(in_place, in_place[mine], what="in place"),
            group.all_reduce(everywhere, what="everywhere"),
        ]
        for handle in handles:
            handle.wait()
        assert same_bits(flat, contribution(group.rank, size * shard_elements, dtype))
        return apart, in_place[mine], everywhere

    for rank, (apart, in_place, everywhere) in enumerate(every(groups, job)):
        mine = expected[rank * shard_elements : (rank + 1) * shard_elements]
        assert same_bits(apart, mine)
        assert same_bits(in_place, mine)
        assert same_bits(everywhere, expected)


def test_the_order_of_the_sum_shows_in_these_values() -> None:
    """The values of these tests would tell another order of three ranks, and a rounding after each addition."""
    parts = [contribution(rank, 1000, torch.bfloat16) for rank in range(3)]
    floats = [contribution(rank, 1000, torch.float32) for rank in range(3)]
    assert not same_bits((floats[2] + floats[1]) + floats[0], summed(3, 1000, torch.float32))
    assert not same_bits((parts[0] + parts[1]) + parts[2], summed(3, 1000, torch.bfloat16))


def test_values_that_are_not_finite_survive_a_sum(groups: list[Group]) -> None:
    """A NaN or an overflow on one rank is one on every rank, so that all of them skip the step."""

    def job(group: Group) -> torch.Tensor:
        flat = torch.full((6 * len(groups),), 60000.0, dtype=torch.float16)
        flat[1] = math.nan if group.rank == 0 else 1.0
        group.all_reduce(flat, what="gradient").wait()
        return flat

    for flat in every(groups, job):
        assert torch.isnan(flat[1])
        assert torch.isinf(flat[2]) == (len(groups) > 1)


def test_broadcast_gives_everybody_the_source(groups: list[Group]) -> None:
    """The last rank's bits arrive everywhere."""
    source = len(groups) - 1

    def job(group: Group) -> torch.Tensor:
        flat = contribution(group.rank, 501, torch.bfloat16)
        group.broadcast(flat, source=source, what="weights").wait()
        return flat

    for flat in every(groups, job):
        assert same_bits(flat, contribution(source, 501, torch.bfloat16))


def test_small_values_are_gathered_in_rank_order(groups: list[Group]) -> None:
    """Objects, integers of any length, the least; NaN is not lost; fp64 arrives exactly (C92)."""
    size = len(groups)

    def job(group: Group) -> list[object]:
        return [
            group.gather({"rank": group.rank, "name": "é" * group.rank, "sums": [0.1 + group.rank]}, what="facts"),
            group.gather(1 << (100 * group.rank), what="touched"),
            minimum(group, 3.5 - group.rank, what="room"),
            minimum(group, math.nan if group.rank == size - 1 else 0.0, what="norm"),
        ]

    for facts, touched, least, norm in every(groups, job):
        assert facts == [{"rank": rank, "name": "é" * rank, "sums": [0.1 + rank]} for rank in range(size)]
        assert touched == [1 << (100 * rank) for rank in range(size)]
        assert least == 3.5 - (size - 1)
        assert math.isnan(norm)


def test_many_collectives_under_way_keep_their_order(groups: list[Group]) -> None:
    """Handles may be waited for in any order, and a buffer that only its handle knows stays alive."""
    size = len(groups)

    def job(group: Group) -> list[torch.Tensor]:
        results = [torch.empty(size * 100) for _ in range(50)]
        handles = [
            group.all_gather(torch.full((100,), float(number * 10 + group.rank)), result, what=f"unit {number}")
            for number, result in enumerate(results)
        ]
        for handle in reversed(handles):
            handle.wait()
        return results

    for results in every(groups, job):
        for number, result in enumerate(results):
            assert torch.equal(result, torch.arange(size).repeat_interleave(100).add(number * 10.0))


@pytest.mark.parametrize(
    ("shard", "flat"),
    [
        (torch.zeros(4), torch.zeros(99)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.zeros(2, 2), torch.zeros(4)),
        (torch.zeros(8)[::2], torch.zeros(4)),
    ],
)
def test_buffers_that_do_not_fit_each_other_are_refused(
    groups: list[Group], shard: torch.Tensor, flat: torch.Tensor
) -> None:
    """Before anything crosses a link, by the rank itself; the group goes on."""
    with pytest.raises(CommError, match=r"blocks\.0"):
        groups[0].all_gather(shard, flat, what="blocks.0")


def test_sums_of_integers_are_refused(groups: list[Group]) -> None:
    """Only floating-point types that a gradient has are summed."""
    with pytest.raises(CommError, match="int64"):
        groups[0].all_reduce(torch.zeros(6, dtype=torch.int64), what="counts")


def test_bytes_are_counted_as_the_theory_counts_them() -> None:
    """(N - 1) / N x elements x bytes; all_reduce is a reduce_scatter and an all_gather. After close a group refuses work."""
    recorders = [Recorder(), Recorder(), Recorder()]
    with ranks(3, recorders) as groups:

        def job(group: Group) -> None:
            flat = torch.zeros(300, dtype=torch.bfloat16)
            group.all_gather(flat[:100].clone(), flat, what="weights").wait()
            group.reduce_scatter(flat.float(), torch.empty(100), what="gradient").wait()
            group.all_reduce(flat, what="gradient").wait()
            group.broadcast(flat, source=1, what="weights").wait()

        every(groups, job)
    for recorder in recorders:
        assert recorder.counters() == {
            "all_gather_bytes": 400 + 400,
            "reduce_scatter_bytes": 800 + 400,
            "broadcast_bytes": 400,
        }
    with pytest.raises(IllegalTransition, match="close"):
        groups[0].all_reduce(torch.zeros(3), what="late")
