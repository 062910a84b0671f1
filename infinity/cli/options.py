"""The options of `infinity train`: names, meanings, and which key of the configuration each stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.errors import ConfigError

# Options that stand for one key of the configuration, by the parameter that holds them. Where one is not given, the
# configuration file, --set or the program's own choice decides.
KEYS = {
    "nvme": ("--nvme", "infinity.nvme"),
    "micro_batch_size": ("--micro-batch-size", "train_micro_batch_size_per_gpu"),
    "micro_batches": ("--micro-batches", "gradient_accumulation_steps"),
    "lr": ("--lr", "optimizer.params.lr"),
    "lr_schedule": ("--lr-schedule", "scheduler.type"),
    "warmup_steps": ("--warmup-steps", "scheduler.params.warmup_num_steps"),
    "weight_decay": ("--weight-decay", "optimizer.params.weight_decay"),
    "grad_clip": ("--grad-clip", "gradient_clipping"),
    "seed": ("--seed", "seed"),
    "stage": ("--stage", "zero_optimization.stage"),
    "cpu_memory": ("--cpu-memory", "infinity.cpu_memory"),
    "gpu_memory": ("--gpu-memory", "infinity.gpu_memory"),
    "offload_optimizer": ("--offload-optimizer", "zero_optimization.offload_optimizer.device"),
    "offload_params": ("--offload-params", "zero_optimization.offload_param.device"),
    "schedule": ("--schedule", "infinity.schedule"),
    "check": ("--check", "infinity.check"),
    "checksums": ("--checksums", "infinity.checksums"),
}

_JOB, _STEP, _PLACES, _LEFT = "The job", "One step", "Memory and disk", "What is left on disk"


def _option(panel: str, flag: str, text: str, metavar: str | None = None, default: str = "", parser: Any = None) -> Any:
    words = f"{text} Default: {default}." if default else text
    return typer.Option(flag, help=words, metavar=metavar, rich_help_panel=panel, show_default=False, parser=parser)


def _whole(panel: str, flag: str, text: str, metavar: str, default: str = "") -> Any:
    return _option(panel, flag, text, metavar, default, _parser(int, "a whole number"))


def _number(panel: str, flag: str, text: str, metavar: str, default: str = "") -> Any:
    return _option(panel, flag, text, metavar, default, _parser(float, "a number"))


def _parser(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Return a parser whose error names the value; typer's own does not."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}.") from None

    return parse


def parse_path(text: str) -> Path:
    """Parse a path. An empty one is what an unset shell variable gives, and would be the working directory."""
    if not text:
        raise typer.BadParameter("'' is not a path.")
    return Path(text)


def whole_number(text: str, *, name: str) -> int:
    """Return what "1e8" and "100_000_000" mean. Raises ConfigError that names the option for what is no whole number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value.is_integer():
        raise ConfigError(f"{name}: {text!r} is not a whole number.", remedy="Give for example 1e8 or 25000000.")
    return int(value)


def _place(panel: str, flag: str, text: str, metavar: str, default: str = "") -> Any:
    return _option(panel, flag, text, metavar, default, parse_path)


Model = Annotated[str, _option(_JOB, "--model", "Size of the decoder, gpt-1m to gpt-70b.", "PRESET", "gpt-25m")]
Data = Annotated[list[Path] | None, _place(_JOB, "--data", "Text; repeatable.", "FILE|DIR", "Python's own source")]
EvalData = Annotated[Path | None, _place(_JOB, "--eval-data", "Text to evaluate on at the end.", "FILE|DIR")]
HoldOut = Annotated[float, _number(_JOB, "--hold-out", "Last share of --data to evaluate on instead.", "SHARE", "0")]
EvalEvery = Annotated[int | None, _whole(_JOB, "--eval-every", "Evaluate every N steps, too.", "N")]
EvalBatches = Annotated[int, _whole(_JOB, "--eval-batches", "Micro-batches of an evaluation.", "N", "8")]
ConfigFile = Annotated[Path | None, _place(_JOB, "--config", "Configuration with DeepSpeed's keys.", "FILE.json")]
Set = Annotated[list[str] | None, _option(_JOB, "--set", "One key; repeatable; wins over the file.", "KEY=VALUE")]
PrintConfig = Annotated[bool, _option(_JOB, "--print-config", "Show every key, its value and where it is from; end.")]
NumGpus = Annotated[int | None, _whole(_JOB, "--num-gpus", "Train on N GPUs of this machine, a rank on each.", "N", "1")]
NumRanks = Annotated[int | None, _whole(_JOB, "--num-ranks", "Instead, without GPUs: on N ranks.", "N", "1")]
Seed = Annotated[int | None, _whole(_JOB, "--seed", "Of initial weights and data.", "N", "0")]

Steps = Annotated[int, _whole(_STEP, "--steps", "Optimizer steps of the whole run.", "N", "300")]
MicroBatchSize = Annotated[int | None, _whole(_STEP, "--micro-batch-size", "Sequences in a micro-batch.", "B", "2")]
MicroBatches = Annotated[int | None, _whole(_STEP, "--micro-batches", "Micro-batches in a step.", "A", "2")]
SeqLen = Annotated[int, _whole(_STEP, "--seq-len", "Tokens in a sequence.", "S", "256")]
Lr = Annotated[float | None, _number(_STEP, "--lr", "Peak learning rate.", "X", "by model size")]
LrSchedule = Annotated[str | None, _option(_STEP, "--lr-schedule", "How lr goes down.", "constant|linear|cosine", "cosine")]
WarmupSteps = Annotated[
    int | None, _whole(_STEP, "--warmup-steps", "Steps in which lr rises from 0.", "N", "10, at most a quarter")
]
WeightDecay = Annotated[float | None, _number(_STEP, "--weight-decay", "Decoupled, as in AdamW.", "X", "0.1")]
GradClip = Annotated[float | None, _number(_STEP, "--grad-clip", "Largest global gradient norm; 0: no limit.", "X", "1")]
Precision = Annotated[
    str | None,
    _option(_STEP, "--precision", "Of weights.", "bf16|fp16|fp32", "bf16 where the machine has it"),
]
Schedule = Annotated[str | None, _option(_STEP, "--schedule", "Order of work.", "vertical|horizontal", "vertical")]
Check = Annotated[bool | None, _option(_STEP, "--check", "Compare every rerun's outputs with the first run's, in bits.")]

_TIERS = "auto|gpu|cpu|nvme"
Nvme = Annotated[list[str] | None, _option(_PLACES, "--nvme", "Directory on a local SSD; repeatable: shared out.", "DIR")]
CpuMemory = Annotated[str | None, _option(_PLACES, "--cpu-memory", "RAM budget, such as 2GiB.", "SIZE", "what is free")]
GpuMemory = Annotated[str | None, _option(_PLACES, "--gpu-memory", "GPU budget, such as 20GiB.", "SIZE", "what is free")]
Stage = Annotated[
    int | None,
    _whole(_PLACES, "--stage", "ZeRO stage, with several ranks.", "0|1|2|3", "the lowest that offloads least"),
]
OffloadOptimizer = Annotated[str | None, _option(_PLACES, "--offload-optimizer", "Tier of optimizer state. [auto]", _TIERS)]
OffloadParams = Annotated[str | None, _option(_PLACES, "--offload-params", "Tier of the weights. [auto]", _TIERS)]
Checksums = Annotated[
    bool | None, _option(_PLACES, "--checksums/--no-checksums", "Check what is read from NVMe with CRC32C.", default="on")
]

OutputDir = Annotated[Path | None, _place(_LEFT, "--output", "Directory of the run.", "DIR", "runs/<model>-<date>-<time>")]
CheckpointEvery = Annotated[
    int | None, _whole(_LEFT, "--checkpoint-every", "Checkpoint every N steps, and at the end.", "N")
]
Keep = Annotated[int, _whole(_LEFT, "--keep", "Newest checkpoints to keep.", "N", "2")]
Resume = Annotated[str, _option(_LEFT, "--resume", "auto: from the newest one in --output.", "auto|none|PATH", "auto")]
Trace = Annotated[Path | None, _place(_LEFT, "--trace", "Write what happened when, for ui.perfetto.dev.", "FILE.json")]
SaveWeights = Annotated[bool, _option(_LEFT, "--save-weights", "Write the trained weights as safetensors at the end.")]
