"""Puts a run's model and engine together: shapes on the meta device, then the plan, then unit by unit into the tiers."""

from __future__ import annotations

import torch

from infinity.byte_sizes import MIB, format_bytes
from infinity.engine import Engine, initialize
from infinity.engine.cut import cut
from infinity.engine.planned import ActivationSizes, plan_for
from infinity.models.gpt import build_meta_gpt, parameter_initializer
from infinity.models.presets import activation_bytes, block_kept_bytes, parameter_count
from infinity.placement import Placement
from infinity.train.preflight import Checked
from infinity.train.reporter import Reporter, Row

# What the C library's allocator keeps above the tensors that are alive.
_ALLOCATOR_SHARE = 1.25
_ALLOCATOR_BYTES = 24 * MIB


def open_training_engine(checked: Checked, reporter: Reporter) -> Engine:
    """Show the plan and return the engine with its initial weights in place.

    Raises DoesNotFit, SwapSpaceError, StorageError, OverBudget; nothing is left behind then.
    """
    config, options = checked.config, checked.options
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float32
    model = build_meta_gpt(checked.gpt, dtype)
    is_vertical = config.infinity.schedule == "vertical"
    estimate = activation_bytes(
        checked.gpt,
        micro_batch_size=checked.batch.micro_batch_size,
        seq_len=options.seq_len,
        num_micro_batches=checked.batch.num_micro_batches if is_vertical else 1,
        dtype_bytes=dtype.itemsize,
    )
    activations = int(estimate * _ALLOCATOR_SHARE) + _ALLOCATOR_BYTES
    placement = Placement.from_config(config)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    block_bytes = block_kept_bytes(
        checked.gpt,
        micro_batch_size=checked.batch.micro_batch_size,
        seq_len=options.seq_len,
        dtype_bytes=dtype.itemsize,
    )

    def kept_bytes(unit: str) -> int:
        return block_bytes if unit.startswith("blocks.") else 0

    plan = plan_for(cut(model, config), config, placement, device, ActivationSizes(activations, kept_bytes))
    reporter.plan((*_rows(checked), *(Row(name, value) for name, value in plan.lines())))
    reporter.phase("Initialising")
    return initialize(
        model=model,
        config=config,
        placement=placement,
        init=parameter_initializer(checked.gpt, config.seed),
        activation_bytes=activations,
        kept_bytes=kept_bytes,
        run_name=options.model,
        num_steps=options.steps,
        adopt=checked.resume_from,
    ).engine


def _rows(checked: Checked) -> tuple[Row, ...]:
    batch, options = checked.batch, checked.options
    data = ", ".join(map(str, options.data)) or "the Python standard library's source"
    rows = [
        Row("model", f"{options.model}, {parameter_count(checked.gpt):,} parameters"),
        Row("precision", "bf16 with a split fp32 master" if checked.config.bf16.enabled else "fp32"),
        Row("data", f"{format_bytes(checked.corpus.num_bytes)} in {len(checked.corpus.sources)} files: {data}"),
        Row(
            "step",
            f"{batch.num_micro_batches} micro-batches of {batch.micro_batch_size} sequences of {options.seq_len} tokens, "
            f"{checked.config.infinity.schedule}",
        ),
        Row("output", str(checked.output.directory)),
        Row("memory free", f"{format_bytes(checked.host_limit.num_bytes)} ({checked.host_limit.source})"),
    ]
    rows += [
        Row("nvme", f"{facts.path} ({facts.file_system}), {format_bytes(facts.free_bytes)} free")
        for facts in checked.directories
    ]
    if checked.probe is not None:
        rows.append(Row("engine", f"{checked.probe.engine}, {'direct' if checked.probe.direct else 'buffered'}"))
    return tuple(rows)
