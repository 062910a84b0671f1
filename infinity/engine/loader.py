"""The data loader that `initialize(training_data=...)` returns: micro-batches of this rank, in an order of the seed's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from infinity.config.batch import BatchSizes

CollateFunction = Callable[[list[Any]], Any]


class RankSampler(Sampler[int]):
    """The samples of one rank, by index. An epoch is one permutation of the data, the same on every rank.

    It is cut into the batches of a step, and each of them into the ranks' micro-batches, rank 0's first: as many ranks as
    share a batch of one size see the same data in the same steps. What an epoch leaves is less than a step: it is shared out
    evenly, with samples from the epoch's beginning where it does not divide; with `drop_last` it is left out.
    """

    def __init__(self, num_samples: int, batch: BatchSizes, rank: int, *, seed: int, drop_last: bool) -> None:
        self._num_samples = num_samples
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that is iterated over next."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch: as many as every other rank has."""
        return self._num_in_steps + self._num_after_steps

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
        step, own = self._batch.train_batch_size, self._batch.train_batch_size // self._batch.world_size
        end = self._num_samples // step * step
        for start in range(0, end, step):
            yield from order[start + self._rank * own : start + (self._rank + 1) * own]
        last = [*order[end:], *islice(cycle(order), self._num_after_steps * self._batch.world_size)]
        yield from last[self._rank * self._num_after_steps : (self._rank + 1) * self._num_after_steps]

    @property
    def _num_in_steps(self) -> int:
        return self._num_samples // self._batch.train_batch_size * self._batch.train_batch_size // self._batch.world_size

    @property
    def _num_after_steps(self) -> int:
        rest = 0 if self._drop_last else self._num_samples % self._batch.train_batch_size
        return -(-rest // self._batch.world_size)


def open_loader(
    dataset: Dataset[Any],
    batch: BatchSizes,
    rank: int,
    *,
    seed: int,
    drop_last: bool,
    collate_fn: CollateFunction | None,
) -> DataLoader[Any]:
    """Return a loader of `micro_batch_size` samples at a time, every rank its own; the last ones of an epoch may be fewer.

    Call `loader.sampler.set_epoch(n)` for another order in every epoch. An IterableDataset keeps its own order, and gives
    every rank what it gives this process: over several ranks it has to leave out the samples of the others itself.
    """
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch.micro_batch_size, collate_fn=collate_fn, drop_last=drop_last)
    num_samples = len(cast(Sized, dataset))
    sampler = RankSampler(num_samples, batch, rank, seed=seed, drop_last=drop_last)
    return DataLoader(dataset, batch_size=batch.micro_batch_size, sampler=sampler, collate_fn=collate_fn)
