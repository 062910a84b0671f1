"""The data loader of `initialize`: the same samples in the same steps on every number of ranks that share a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from infinity.config.batch import resolve_batch
from infinity.engine.loader import open_loader

BATCH_SIZE, MICRO_BATCH_SIZE = 12, 2


class Numbers(Dataset[int]):
    """The numbers below n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def loaders(num_samples: int, world_size: int, *, drop_last: bool = False) -> list[DataLoader[Any]]:
    batch = resolve_batch(BATCH_SIZE, MICRO_BATCH_SIZE, None, world_size=world_size)
    return [
        open_loader(Numbers(num_samples), batch, rank, seed=5, drop_last=drop_last, collate_fn=None)
        for rank in range(world_size)
    ]


def steps(num_samples: int, world_size: int, epoch: int = 0) -> list[list[list[int]]]:
    """Return the micro-batches of each whole step in the global order."""
    num_micro_batches = BATCH_SIZE // MICRO_BATCH_SIZE // world_size
    by_rank = []
    for loader in loaders(num_samples, world_size, drop_last=True):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        by_rank.append([micro_batch.tolist() for micro_batch in loader])
    return [
        [micro_batch for mine in by_rank for micro_batch in mine[first : first + num_micro_batches]]
        for first in range(0, len(by_rank[0]), num_micro_batches)
    ]


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_steps_have_the_same_micro_batches_in_the_same_global_order(world_size: int) -> None:
    """C67: rank r takes micro-batches r A to r A + A - 1 of the step; every epoch has an order of its own."""
    expected = steps(40, 1)
    assert steps(40, world_size) == expected
    assert len(expected) == 3
    assert steps(40, world_size, epoch=1) == steps(40, 1, epoch=1) != expected


@pytest.mark.parametrize(("num_samples", "world_size"), [(40, 1), (40, 2), (41, 2), (47, 3), (5, 3), (2, 3), (36, 3)])
def test_ranks_have_equally_many_and_miss_none(num_samples: int, world_size: int) -> None:
    """Without drop_last every sample is seen, some twice where the rest does not divide; no rank has more batches."""
    opened = loaders(num_samples, world_size)
    seen = [[micro_batch.tolist() for micro_batch in loader] for loader in opened]
    assert len({len(batches) for batches in seen}) == 1
    counts = [sum(map(len, batches)) for batches in seen]
    assert counts == [len(loader.sampler) for loader in opened]  # type: ignore[arg-type]
    assert len(set(counts)) == 1
    assert sum(counts) - num_samples == -num_samples % BATCH_SIZE % world_size
    assert {index for batches in seen for micro_batch in batches for index in micro_batch} == set(range(num_samples))


def test_drop_last_ends_an_epoch_with_its_last_whole_step() -> None:
    """What is less than a step is left out on every rank; without it a rank has the last ones in a shorter micro-batch."""
    assert [[len(one) for one in loader] for loader in loaders(25, 1, drop_last=True)] == [[2] * 12]
    assert [[len(one) for one in loader] for loader in loaders(25, 1)] == [[2] * 12 + [1]]
    assert [len(loader) for loader in loaders(25, 2, drop_last=True)] == [6, 6]


def test_one_rank_has_the_order_of_torch() -> None:
    """The permutation of an epoch is torch's of (seed + epoch), as with its own sampler."""
    [loader] = loaders(20, 1)
    assert [int(index) for one in loader for index in one] == torch.randperm(
        20, generator=torch.Generator().manual_seed(5)
    ).tolist()


def test_an_iterable_dataset_keeps_its_own_order() -> None:
    """It knows its samples alone: every rank gets what it yields."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    batch = resolve_batch(None, 2, 1, world_size=2)
    loader = open_loader(Stream(), batch, 1, seed=0, drop_last=False, collate_fn=None)
    assert [one.tolist() for one in loader] == [[0, 1], [2, 3], [4]]
