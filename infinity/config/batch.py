"""The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The resolved triple for one number of ranks."""

    train_batch_size: int
    micro_batch_size: int  # samples per rank in one micro-batch
    num_micro_batches: int  # per rank and step: gradient accumulation steps
    world_size: int

    def micro_batches_of(self, rank: int) -> range:
        """Return the micro-batches of a rank in the order of a whole step, in which rank 0's come first."""
        return range(rank * self.num_micro_batches, (rank + 1) * self.num_micro_batches)


def resolve_batch(train: int | None, micro: int | None, accumulation: int | None, *, world_size: int) -> BatchSizes:
    """Fill in the missing members of the triple; a missing micro-batch size or accumulation without a total is 1.

    Raises ConfigError, with the arithmetic, where the given ones contradict each other or do not divide.
    """
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation, world_size)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation, "gradient_accumulation_steps", world_size, "train_micro_batch_size_per_gpu")
    elif accumulation is None:
        accumulation = _divide(train, micro, "train_micro_batch_size_per_gpu", world_size, "gradient_accumulation_steps")
    if micro * accumulation * world_size != train:
        raise ConfigError(
            f"train_batch_size is {train}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks = "
            f"{micro} x {accumulation} x {world_size} = {micro * accumulation * world_size}.",
            remedy="Leave one of the three out, or set it to 'auto'.",
        )
    return BatchSizes(train, micro, accumulation, world_size)


def _divide(train: int, given: int, given_name: str, world_size: int, wanted_name: str) -> int:
    quotient, remainder = divmod(train, given * world_size)
    if remainder or not quotient:
        raise ConfigError(
            f"{wanted_name} = train_batch_size / ({given_name} x ranks) = {train} / ({given} x {world_size}) = "
            f"{train / (given * world_size):.4g} is not a whole number of at least 1.",
            remedy=f"Make train_batch_size a multiple of {given * world_size}.",
        )
    return quotient
