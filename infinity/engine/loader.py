"""The data loader that `initialize(training_data=...)` returns: micro-batches of this rank, in an order of the seed's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from infinity.config.batch import BatchSizes
from infinity.engine.ranks import Ranks

CollateFunction = Callable[[list[Any]], Any]


def open_loader(
    dataset: Dataset[Any], batch: BatchSizes, ranks: Ranks, *, seed: int, collate_fn: CollateFunction | None
) -> DataLoader[Any]:
    """Return a loader of `micro_batch_size` samples at a time, every rank its own; the last ones of an epoch may be fewer.

    Call `loader.sampler.set_epoch(n)` for another order in every epoch. An IterableDataset keeps its own order.
    """
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=ranks.world_size, rank=ranks.global_rank, seed=seed)
    return DataLoader(dataset, batch_size=batch.micro_batch_size, sampler=sampler, collate_fn=collate_fn)
