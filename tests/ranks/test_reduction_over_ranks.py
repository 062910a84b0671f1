"""Gradients over ranks: RankReduction hands on this rank's part of the sum; micro-batches are added up in their order."""

from dataclasses import dataclass, field

import pytest
import torch
from rank_threads import on_every_rank, ranks

from infinity.store.layout import ParameterSpec
from infinity.store.unit_size import unit_layouts
from infinity.zero.gradients import FinalRun
from infinity.zero.reduction import PartSums, RankReduction

SPECS = [
    ParameterSpec("frozen", (5,), "bfloat16", trainable=False),
    ParameterSpec("a", (70, 3), "bfloat16", trainable=True),
    ParameterSpec("scale", (), "float32", trainable=True),
    ParameterSpec("b", (129,), "float32", trainable=True),
]


@dataclass
class Parts:
    """Takes the parts of one rank."""

    layouts: list
    published: list = field(default_factory=list)

    def publish(self, shard, runs, touched):
        flat = torch.full((self.layouts[shard].part.num_state_elements,), float("nan"))
        for run in runs:
            flat[run.start : run.start + run.values.numel()] = run.values
        self.published.append((shard, flat, touched))


class Place:
    """Sums in memory, as the engine keeps them."""

    def __init__(self, layouts, target):
        self.layouts, self.target, self.flats = layouts, target, {}

    def at(self, shard, number, *, fresh):
        if fresh:
            self.flats[shard] = torch.full((self.layouts[shard].part.num_state_elements,), float("nan"))
        return self.flats[shard]

    def leave(self, shard):
        """They stay."""

    def publish(self, shard, total, touched):
        self.target.publish(shard, [FinalRun(0, total)], touched)

    def discard(self):
        self.flats.clear()


def layouts_of(rank, size):
    return [
        unit_layouts(index, f"unit{index}", SPECS, tile_elements=64, stage=2, num_ranks=size, rank=rank)
        for index in range(3)
    ]


def gradient(rank, shard, micro_batch, whole):
    """A whole unit's gradient with values of very different sizes; only where parameters are."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * shard + micro_batch)
    flat = torch.zeros(whole.num_state_elements)
    for section in whole.sections:
        for segment in section.segments if section.trainable else ():
            start = section.state_offset + segment.offset
            values = torch.randn(segment.length, generator=generator)
            flat[start : start + segment.length] = values * 10.0 ** torch.randint(
                -3, 4, (segment.length,), generator=generator
            )
    return flat


def part_of(whole, flat, rank, size):
    """A rank's part of each trainable section, one behind the other."""
    sections = [section for section in whole.sections if section.trainable]
    return torch.cat([
        flat[section.state_offset :][: section.unit_elements].chunk(size)[rank] for section in sections
    ])  # fmt: skip


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_part_of_the_sum_in_the_order_of_the_ranks(size, sent):
    """Bit for bit, for sections of two dtypes and a parameter of one element; a unit that nobody touched is zeros.

    Sent in bf16 each rank's gradient is rounded, summed in fp32 and rounded again.
    """
    with ranks(size) as groups:

        def job(rank):
            layouts = layouts_of(rank, size)
            target = Parts(layouts)
            whole = layouts[0].whole
            flat = torch.empty(whole.num_state_elements, dtype=sent)
            reduction = RankReduction(group=groups[rank], layouts=layouts, flat=flat, target=target, part_sums=None)
            for shard in (2, 0):
                reduction.publish(shard, [FinalRun(0, gradient(rank, shard, 0, whole))], frozenset({"a"} if rank else ()))
            reduction.publish(1, [], frozenset())
            reduction.finish()
            return target.published

        results = on_every_rank(size, job)
    whole = layouts_of(0, size)[0].whole
    for rank, published in enumerate(results):
        assert not isinstance(published, BaseException), published
        assert [(shard, touched) for shard, _, touched in published] == [
            (2, frozenset({"a"} if rank else ())), (0, frozenset({"a"} if rank else ())), (1, frozenset())
        ]  # fmt: skip
        for shard, flat, _ in published:
            total = gradient(0, shard, 0, whole).to(sent).float()
            for other in range(1, size):
                total = total + gradient(other, shard, 0, whole).to(sent).float()
            total = total.to(sent).float()
            expected = torch.zeros_like(total) if shard == 1 else total
            assert torch.equal(flat, part_of(whole, expected, rank, size))


def test_micro_batches_are_summed_over_ranks_one_by_one_and_then_added_up():
    """(x0 + y0) + (x1 + y1) + (x2 + y2), each over ranks first; touched parameters of all micro-batches."""
    size = 2
    with ranks(size) as groups:

        def job(rank):
            layouts = layouts_of(rank, size)
            target = Parts(layouts)
            whole = layouts[0].whole
            reduction = RankReduction(
                group=groups[rank],
                layouts=layouts,
                flat=torch.empty(whole.num_state_elements),
                target=target,
                part_sums=PartSums(Place(layouts, target)),
            )
            reduction.begin_micro_batches()
            for micro_batch in range(3):
                for shard in (1, 0):
                    runs = [FinalRun(0, gradient(rank, shard, micro_batch, whole))]
                    reduction.publish(shard, runs, frozenset({SPECS[1 + micro_batch].name}))
            assert target.published == []
            reduction.finish()
            return target.published

        results = on_every_rank(size, job)
    whole = layouts_of(0, size)[0].whole
    for rank, published in enumerate(results):
        assert not isinstance(published, BaseException), published
        assert [shard for shard, _, _ in published] == [1, 0]
        for shard, flat, touched in published:
            sums = [gradient(0, shard, k, whole) + gradient(1, shard, k, whole) for k in range(3)]
            assert torch.equal(flat, part_of(whole, sums[0] + sums[1] + sums[2], rank, size))
            assert touched == {"a", "scale", "b"}
