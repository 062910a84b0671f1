"""Puts a run's model and engine together: shapes on the meta device, then the plan, then unit by unit into the tiers."""

from __future__ import annotations

import shutil

import torch

from infinity.aio.select import Probe, works_in_all
from infinity.byte_sizes import format_bytes
from infinity.comm.launched import Ranks
from infinity.config import Config
from infinity.config.optimizer import OptimizerSection
from infinity.config.scheduler import SchedulerSection
from infinity.engine import Engine, initialize
from infinity.memory.host_allocator import tune_host_allocator
from infinity.models.gpt import build_meta_gpt, parameter_initializer
from infinity.models.presets import block_kept_bytes, parameter_count
from infinity.optim.kernel import choose_kernel
from infinity.placement import Plan, Schedule
from infinity.store.checksums import checksum_kernels
from infinity.train.activation_budget import activation_budget_bytes
from infinity.train.preflight import Checked, state_bytes
from infinity.train.reporter import Reporter, Row
from infinity.train.summary import io_words

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_training_engine(checked: Checked, reporter: Reporter) -> Engine:
    """Show the plan and return the engine with its initial weights in place.

    Raises DoesNotFit, SwapSpaceError, StorageError, OverBudget; nothing is left behind then.
    """
    config, options = checked.config, checked.options
    dtype = _DTYPES[config.precision]
    tune_host_allocator()  # before the model's first buffer: torch asks for huge pages then or never
    model = build_meta_gpt(checked.gpt, dtype)
    activations = activation_budget_bytes(
        checked.gpt,
        micro_batch_size=checked.batch.micro_batch_size,
        seq_len=options.seq_len,
        num_micro_batches=checked.batch.num_micro_batches,
        schedule=Schedule(config.infinity.schedule),
        dtype_bytes=dtype.itemsize,
    )
    block_bytes = block_kept_bytes(
        checked.gpt,
        micro_batch_size=checked.batch.micro_batch_size,
        seq_len=options.seq_len,
        dtype_bytes=dtype.itemsize,
    )

    def kept_bytes(unit: str) -> int:
        return block_bytes if unit.startswith("blocks.") else 0

    def on_plan(plan: Plan) -> None:
        if not checked.ranks.speaks:
            return
        reporter.plan((*_rows(checked), *(Row(name, value) for name, value in plan.lines())))
        _say_what_checkpoints_take(checked, plan, reporter)
        reporter.phase("Initialising")

    engine = initialize(
        model=model,
        config=config,
        init=parameter_initializer(checked.gpt, config.seed),
        activation_bytes=activations,
        kept_bytes=kept_bytes,
        run_name=options.model,
        num_steps=options.steps,
        adopt=checked.resume_from,
        probed=checked.probes,
        on_plan=on_plan,
    ).engine
    if engine.plan.uses_nvme:
        facts = engine.io
        words = io_words(facts.engine, registered_files=facts.registered_files, registered_buffers=facts.registered_buffers)
        reporter.note(f"Reads and writes: {words}.")
    for note in engine.notes:
        if note not in config.notes():
            reporter.note(note)
    return engine


def _say_what_checkpoints_take(checked: Checked, plan: Plan, reporter: Reporter) -> None:
    """A note where the disk has no room for the swap files, the copies that are kept, and one more while it is written."""
    options = checked.options
    copy_bytes = state_bytes(checked.config, parameter_count(checked.gpt))
    num_copies = options.keep + 1 if options.checkpoint_every else 1
    output = checked.output.directory
    needed = num_copies * copy_bytes
    if any(facts.path.stat().st_dev == output.stat().st_dev for facts in checked.directories):
        needed += plan.disk_bytes * checked.ranks.local_world_size
    free = shutil.disk_usage(output).free
    if needed > free:
        reporter.note(
            f"Checkpoints: {num_copies} of {format_bytes(copy_bytes)} and the swap files need {format_bytes(needed)}, "
            f"{output} has {format_bytes(free)} free: {_without_room(checked.ranks)}."
        )


def _without_room(ranks: Ranks) -> str:
    """What becomes of a checkpoint that has no room."""
    if ranks.world_size == 1:
        return "where a copy does not fit, the swap files are committed in place"
    return (
        "over several ranks the run ends at the first copy that does not fit. Lower --keep, or put --output on a larger disk"
    )


def _rows(checked: Checked) -> tuple[Row, ...]:
    batch, options = checked.batch, checked.options
    data = ", ".join(map(str, options.data)) or "the Python standard library's source"
    rows = [
        Row("model", f"{options.model}, {parameter_count(checked.gpt):,} parameters"),
        Row("precision", _precision_words(checked.config)),
        Row("optimizer", _optimizer_words(checked.config.optimizer)),
        Row("lr schedule", _schedule_words(checked.config.scheduler)),
        Row("data", f"{format_bytes(checked.corpus.num_bytes)} in {len(checked.corpus.sources)} files: {data}"),
        Row(
            "step",
            f"{batch.num_micro_batches} micro-batches of {batch.micro_batch_size} sequences of {options.seq_len} tokens"
            f"{_ranks_words(checked.ranks)}, {checked.config.infinity.schedule}",
        ),
        Row("output", str(checked.output.directory)),
        Row("configuration", _configuration_words(checked)),
        Row("memory free", f"{format_bytes(checked.host_limit.num_bytes)} ({checked.host_limit.source})"),
    ]
    rows.append(Row("adam", choose_kernel(num_threads=checked.config.infinity.adam_threads).words()))
    rows += [
        Row("nvme", f"{facts.path} ({facts.file_system}), {format_bytes(facts.free_bytes)} free")
        for facts in checked.directories
    ]
    if checked.probes:
        rows.append(Row("engine", _engine_words(works_in_all(tuple(checked.probes.values())))))
        checksums = (
            f"CRC32C ({checksum_kernels()[0]}) of what is read from NVMe" if checked.config.infinity.checksums else "off"
        )
        rows.append(Row("checksums", checksums))
    return tuple(rows)


def _ranks_words(ranks: Ranks) -> str:
    if ranks.world_size == 1:
        return ""
    here = "" if ranks.local_world_size == ranks.world_size else f", {ranks.local_world_size} of them on this machine"
    return f" on each of {ranks.world_size} ranks{here}"


def _precision_words(config: Config) -> str:
    if config.precision == "fp32":
        return "fp32"
    if config.precision == "bf16":
        return "bf16 with a split fp32 master" if config.optimizer.is_native else "bf16 beside an fp32 master"
    section = config.fp16
    scale = f"loss scale {section.loss_scale:g}"
    if not section.loss_scale:
        scale = f"loss scale from {2.0**section.initial_scale_power:g}, dynamic"
    return f"fp16 beside an fp32 master, {scale}"


def _optimizer_words(section: OptimizerSection) -> str:
    where = " in the gradient" if section.is_native and not section.decoupled else ""
    words = []
    for name, value in section.values().items():
        numbers = value if isinstance(value, tuple) else (value,)
        said = " ".join(str(number).lower() if isinstance(number, bool) else f"{number:g}" for number in numbers)
        words.append(f"{name.replace('_', ' ')} {said}{where if name == 'weight_decay' else ''}")
    return ", ".join([section.type, *words])


def _schedule_words(section: SchedulerSection) -> str:
    return ", ".join([section.type, *(f"{name} {value}" for name, value in section.values().items() if value is not None)])


def _configuration_words(checked: Checked) -> str:
    resolved = checked.config.resolved(checked.ranks.world_size)
    num_given = sum(map(checked.config.is_given, resolved))
    return f"{num_given} of {len(resolved)} keys given; all, with their sources, in {checked.output.plan.name}"


def _engine_words(found: Probe) -> str:
    can = [name for name, works in (("files", found.registers_files), ("buffers", found.registers_buffers)) if works]
    registers = f"can register {' and '.join(can)}" if can else "registers nothing"
    return f"{found.engine}, {'O_DIRECT' if found.direct else 'through the page cache'}, {registers}"
