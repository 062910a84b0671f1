"""Where a run stands: the part of a checkpoint that belongs to the loop and not to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.errors import CheckpointMismatch
from infinity.train.preflight import Checked

# What checkpoints from before there were ranks do not say.
_BEFORE_RANKS = {"num_ranks": 1}


@dataclass(frozen=True, slots=True)
class Position:
    """Steps and tokens that are done. Data need nothing more: a step's windows follow from its number, on any ranks."""

    step: int = 0
    tokens: int = 0


def position_record(position: Position, checked: Checked) -> dict[str, object]:
    """Return what a checkpoint keeps, ready for JSON."""
    return {"step": position.step, "tokens": position.tokens, **_decisive(checked)}


def read_position(record: Mapping[str, object], checked: Checked) -> tuple[Position, tuple[str, ...]]:
    """Return the position and a sentence for each thing that makes the run differ from the checkpoint's.

    Raises CheckpointMismatch for a checkpoint that no training loop wrote.
    """
    step, tokens = record.get("step"), record.get("tokens")
    if not isinstance(step, int) or not isinstance(tokens, int):
        raise CheckpointMismatch(
            f"{checked.resume_from} was not written by infinity train: it has no step and tokens of a training loop.",
            remedy="Load it through the Python API.",
        )
    differences = tuple(
        f"{name} was {record.get(name)} in the checkpoint and is {value} now: the run goes on, but not bit for bit."
        for name, value in _decisive(checked).items()
        if record.get(name, _BEFORE_RANKS.get(name)) != value
    )
    return Position(step, tokens), (*differences, *_other_batches(record, checked))


def _other_batches(record: Mapping[str, object], checked: Checked) -> tuple[str, ...]:
    """A sentence on a step of more or fewer sequences than in the checkpoint, and on what keeps them."""
    before, batch = (record.get("num_micro_batches"), record.get("micro_batch_size")), checked.batch
    if not isinstance(before[0], int) or not isinstance(before[1], int) or before[0] * before[1] == batch.train_batch_size:
        return ()
    num_before = before[0] * before[1]
    num_micro_batches, rest = divmod(num_before, batch.micro_batch_size * batch.world_size)
    keeps = f"--micro-batches {num_micro_batches}" if not rest else f"a train_batch_size of {num_before}"
    return (
        f"A step had {num_before} sequences in the checkpoint and has {batch.train_batch_size} now, "
        f"so its data are others, too; {keeps} keeps them.",
    )


def _decisive(checked: Checked) -> dict[str, object]:
    """Return what decides the bits of a step beside the model: a run that goes on with other values is told so."""
    batch, options, config = checked.batch, checked.options, checked.config
    num_ranks = batch.world_size
    sections = {"optimizer.params": config.optimizer.params, "scheduler.params": config.scheduler.params}
    return {
        "corpus_bytes": checked.corpus.num_bytes,
        "seq_len": options.seq_len,
        "micro_batch_size": batch.micro_batch_size,
        "num_micro_batches": batch.num_micro_batches * num_ranks,  # of a step, over all ranks
        "num_ranks": num_ranks,
        "seed": config.seed,
        "gradient_clipping": config.gradient_clipping,
        "grad_dtype": config.grad_dtype,
        **({f"fp16.{key}": value for key, value in config.fp16.model_dump().items()} if config.fp16.enabled else {}),
        "optimizer.type": config.optimizer.type,
        "scheduler.type": config.scheduler.type,
        **{
            f"{name}.{key}": value
            for name, section in sections.items()
            for key, value in section.model_dump(mode="json").items()
        },
    }
