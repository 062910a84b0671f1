"""`infinity plan`: what each ZeRO stage takes of a machine that need not be there, and which one training would choose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from infinity.cli import options as o
from infinity.cli.console import open_console
from infinity.cli.failures import failures_explained
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infinity.models.shapes import ModelShape
    from infinity.placement import Schedule
    from infinity.states import StateKind
    from infinity.train.outlook import Outlook, Question, StageOutlook

_Model = Annotated[
    str | None,
    typer.Option("--model", metavar="PRESET|PATH", help="A preset, or a directory with a config.json of transformers."),
]
_Parameters = Annotated[str | None, typer.Option("--parameters", metavar="N", help="Instead: their number, such as 7e9.")]
_NumGpus = Annotated[int | None, typer.Option("--num-gpus", metavar="N", help="Ranks, each with a GPU.")]
_NumRanks = Annotated[
    int | None, typer.Option("--num-ranks", metavar="N", help="Ranks of a machine without GPUs. Default: 1.")
]
_Stage = Annotated[str, typer.Option("--stage", metavar="all|0|1|2|3", help="ZeRO stage.")]
_Precision = Annotated[str, typer.Option("--precision", metavar="bf16|fp16|fp32", help="Of weights and gradients.")]
_GpuMemory = Annotated[str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Of one GPU, such as 80GiB.")]
_CpuMemory = Annotated[
    str | None,
    typer.Option(
        "--cpu-memory", metavar="SIZE", help="RAM of the machine, shared by its ranks. Default: what is free here."
    ),
]
_NvmeSpace = Annotated[
    str | None, typer.Option("--nvme-space", metavar="SIZE", help="Free space on NVMe. Default: there is none.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

_GB = 10**9
_PLAIN_COLUMNS = 140  # of a table that goes to a file or another program


def plan(
    model: _Model = None,
    parameters: _Parameters = None,
    num_gpus: _NumGpus = None,
    num_ranks: _NumRanks = None,
    stage: _Stage = "all",
    precision: _Precision = "bf16",
    micro_batch_size: o.MicroBatchSize = None,
    micro_batches: o.MicroBatches = None,
    seq_len: o.SeqLen = 256,
    schedule: o.Schedule = None,
    gpu_memory: _GpuMemory = None,
    cpu_memory: _CpuMemory = None,
    nvme_space: _NvmeSpace = None,
    offload_optimizer: o.OffloadOptimizer = None,
    offload_params: o.OffloadParams = None,
    as_json: _Json = False,
) -> None:
    """Show what a model takes on each rank in every ZeRO stage, beside the textbook's figures, and what would be chosen."""
    with failures_explained():
        from infinity.byte_sizes import parse_bytes
        from infinity.memory.limits import plannable_host_bytes
        from infinity.placement import Placement, Schedule
        from infinity.train.options import DEFAULT_MICRO_BATCH_SIZE, DEFAULT_NUM_MICRO_BATCHES, require_at_least_one
        from infinity.train.outlook import Question, look_ahead

        counts = {
            "--num-gpus": num_gpus, "--num-ranks": num_ranks, "--micro-batch-size": micro_batch_size,
            "--micro-batches": micro_batches, "--seq-len": seq_len,
        }  # fmt: skip
        require_at_least_one(counts.items())
        if num_ranks is not None and (num_gpus is not None or gpu_memory is not None):
            raise ConfigError(
                "--num-ranks is for a machine without GPUs.", remedy="Give --num-gpus alone, with --gpu-memory."
            )
        if nvme_space is None and "nvme" in (offload_optimizer, offload_params):
            raise ConfigError(
                "States are to live on NVMe, but there is none.", remedy="Give its free space: --nvme-space SIZE."
            )
        question = Question(
            shape=_shape(model, parameters),
            precision=precision,
            num_ranks=num_gpus or num_ranks or 1,
            stages=_stages(stage),
            placement=Placement().override("*", optim=offload_optimizer or "auto", params=offload_params or "auto"),
            micro_batch_size=micro_batch_size or DEFAULT_MICRO_BATCH_SIZE,
            num_micro_batches=micro_batches or DEFAULT_NUM_MICRO_BATCHES,
            seq_len=seq_len,
            schedule=_schedule(schedule or Schedule.VERTICAL.value),
            has_gpu=num_gpus is not None or gpu_memory is not None,
            gpu_memory_bytes=None if gpu_memory is None else parse_bytes(gpu_memory, name="--gpu-memory"),
            cpu_memory_bytes=(
                plannable_host_bytes() if cpu_memory is None else parse_bytes(cpu_memory, name="--cpu-memory")
            ),
            nvme_bytes=None if nvme_space is None else parse_bytes(nvme_space, name="--nvme-space"),
        )
        outlook = look_ahead(question)
        if as_json:
            typer.echo(json.dumps(outlook.to_json(), indent=2))
        else:
            _show(outlook, open_console())


def _shape(model: str | None, parameters: str | None) -> ModelShape:
    from infinity.models.families import config_shape
    from infinity.models.presets import PRESETS
    from infinity.models.shapes import counted_shape, preset_shape

    if (model is None) == (parameters is None):
        given = "neither is given" if model is None else "both are given"
        raise ConfigError(f"--model and --parameters: {given}.", remedy="Give one of them, such as --parameters 7e9.")
    if parameters is not None:
        return counted_shape(o.whole_number(parameters, name="--parameters"))
    name = str(model)
    is_path = name not in PRESETS and (Path(name).exists() or "/" in name)
    return config_shape(Path(name)) if is_path else preset_shape(name)


def _stages(text: str) -> tuple[int, ...]:
    from infinity.train.outlook import STAGES

    known = {"all": STAGES, **{str(number): (number,) for number in STAGES}}
    if text not in known:
        raise ConfigError(f"--stage: {text!r} is no stage.", remedy=f"Known: {', '.join(known)}.")
    return known[text]


def _schedule(text: str) -> Schedule:
    from infinity.placement import Schedule

    known = {one.value: one for one in Schedule}
    if text not in known:
        raise ConfigError(f"--schedule: {text!r} is not known.", remedy=f"Known: {', '.join(known)}.")
    return known[text]


def _show(outlook: Outlook, console: Console) -> None:
    for line in _heading(outlook):
        console.print(Text(line))
    columns = open_console(soft_wrap=False, width=None if console.is_terminal else _PLAIN_COLUMNS)
    columns.print(_table(outlook))
    for line in (*_link_words(outlook), *_refusals(outlook)):
        console.print(Text(line))
    chosen = outlook.chosen
    if chosen is not None and chosen.plan is not None and outlook.choice is not None:
        console.print(Text(f"\nChosen: stage {chosen.stage}. {outlook.choice.reason}", style="bold"))
        rows = chosen.plan.lines()
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            console.print(Text(f"  {name:<{width}}  {value}"))


def _heading(outlook: Outlook) -> Iterator[str]:
    from infinity.placement.zero_memory import TEXTBOOK_BYTES
    from infinity.train.outlook import element_bytes

    question, shape = outlook.question, outlook.question.shape
    ours, textbook = _sum_words(element_bytes(question.precision)), _sum_words(TEXTBOOK_BYTES)
    yield f"{shape.name}: {shape.num_parameters:,} parameters"
    if shape.note:
        yield shape.note
    yield f"Bytes per parameter for weights, gradients and optimizer: {ours} in {question.precision}; textbook {textbook}."
    yield _machine_words(question)
    yield (
        "On each rank, in GB (10^9 bytes): states as in the textbook and ours; the plan's peaks and what is on NVMe; what a "
        "step reads and writes there, and moves between ranks:"
    )


def _link_words(outlook: Outlook) -> Iterator[str]:
    for one in outlook.stages:
        for link, lines in groupby(one.links, key=lambda line: line.link):
            words = ", ".join(f"{line.what} {_gb(line.num_bytes)} GB" for line in lines)
            yield f"Stage {one.stage}, {link.value} a step: {words}"


def _refusals(outlook: Outlook) -> Iterator[str]:
    refused = [one for one in outlook.stages if one.plan is None]
    for (reason, remedy), ones in groupby(refused, key=lambda one: (one.why_no_plan, one.remedy)):
        numbers = [str(one.stage) for one in ones]
        subject = f"Stage {numbers[0]} has" if len(numbers) == 1 else f"Stages {', '.join(numbers)} have"
        yield f"{subject} no plan: {reason} {remedy}"


def _machine_words(question: Question) -> str:
    from infinity.byte_sizes import format_bytes

    gpus = "no GPU"
    if question.has_gpu:
        size = "of unknown size" if question.gpu_memory_bytes is None else f"of {format_bytes(question.gpu_memory_bytes)}"
        gpus = f"each with a GPU {size}"
    disk = "no NVMe" if question.nvme_bytes is None else f"{format_bytes(question.nvme_bytes)} of NVMe"
    return (
        f"{question.num_ranks} {'rank' if question.num_ranks == 1 else 'ranks'}, {gpus}; "
        f"{format_bytes(question.cpu_memory_bytes)} of RAM and {disk} together; "
        f"{question.num_micro_batches} micro-batches of {question.micro_batch_size} x {question.seq_len} tokens, "
        f"{question.schedule.value}."
    )


def _table(outlook: Outlook) -> Table:
    from rich.table import Table

    question = outlook.question
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # narrow: it has to fit into 80 columns
    table.add_column("stage", no_wrap=True)
    names = ["textbook", "states", *(["GPU"] if question.has_gpu else []), "RAM", "NVMe"]
    for name in (*names, "read", "written", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in outlook.stages:
        table.add_row(*_cells(one, outlook))
    return table


def _cells(one: StageOutlook, outlook: Outlook) -> tuple[str, ...]:
    from infinity.placement import Link
    from infinity.states import Tier

    tiers = (Tier.GPU, Tier.CPU) if outlook.question.has_gpu else (Tier.CPU,)
    planned = [""] * (len(tiers) + 3)
    if one.plan is not None:
        figures = (
            *map(one.plan.memory_bytes, tiers),
            one.plan.disk_bytes,
            one.plan.nvme_read_bytes,
            one.plan.nvme_write_bytes,
        )
        planned = [_gb(figure) for figure in figures]
    verdict = "no plan" if one.plan is None else ""
    if one is outlook.chosen:
        verdict = "chosen"
    if outlook.question.has_gpu and outlook.question.gpu_memory_bytes is None:
        verdict = ""
    between = sum(line.num_bytes for line in one.links if line.link is Link.RANKS)
    return (str(one.stage), _gb(one.textbook.total), _gb(one.own.total), *planned, _gb(between), verdict)


def _sum_words(sizes: Mapping[StateKind, int]) -> str:
    return f"{' + '.join(map(str, sizes.values()))} = {sum(sizes.values())}"


def _gb(num_bytes: float) -> str:
    figure = num_bytes / _GB
    return f"{figure:.2f}" if figure < 1000 else f"{figure:.0f}"
