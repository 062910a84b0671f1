"""What `infinity train` was asked for, and what it chooses where it was not; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.config import Config, Layer
from infinity.config.scheduler import DEEPSPEED_TYPES, PARAMS_OF_TYPE
from infinity.errors import ConfigError
from infinity.models.presets import parameter_count, preset

DEFAULT_MODEL = "gpt-25m"
DEFAULT_STEPS = 300
DEFAULT_SEQ_LEN = 256
DEFAULT_KEEP = 2
DEFAULT_EVAL_BATCHES = 8
DEFAULT_MICRO_BATCH_SIZE, DEFAULT_NUM_MICRO_BATCHES = 2, 2

_CHOSEN = "chosen by infinity train"
_WARMUP_STEPS = 10
# Peak learning rate by parameter count: smaller models bear larger ones.
_LEARNING_RATES = ((60e6, 1e-3), (300e6, 6e-4), (3e9, 3e-4), (float("inf"), 1.5e-4))
# As the kernel names what makes bf16 matrix products native (x86, Arm).
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CPU_INFO = Path("/proc/cpuinfo")
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One training run of a built-in model."""

    config: Config
    model: str = DEFAULT_MODEL
    steps: int = DEFAULT_STEPS
    seq_len: int = DEFAULT_SEQ_LEN
    data: tuple[Path, ...] = ()  # empty: the Python standard library's source
    eval_data: Path | None = None
    hold_out: float = 0.0  # share at the end of the data that is evaluated instead of trained on
    eval_batches: int = DEFAULT_EVAL_BATCHES  # micro-batches of an evaluation
    eval_every: int | None = None  # steps; None: at the end only
    output: Path | None = None  # None: a new directory below runs/
    checkpoint_every: int | None = None  # steps; None: only when a signal ends the run
    keep: int = DEFAULT_KEEP  # newest checkpoints that stay
    resume: str = "auto"  # "auto", "none" or the path of a checkpoint
    save_weights: bool = False
    trace: Path | None = None  # file for what the run did when, in the Chrome trace event format


def resolve_config(layers: Sequence[Layer], *, model: str, steps: int, has_native_bf16: bool) -> Config:
    """Return the configuration that the user's `layers` mean, with everything they leave open chosen for the model.

    Raises ConfigError for an unknown preset and for everything that Config refuses.
    """
    given = Config.from_layers(layers)
    chosen: dict[str, object] = {
        "bf16.enabled": has_native_bf16 and not given.fp16.enabled,
        **_hyper_parameters(given, model),
        **_schedule(given, max(1, steps)),
    }
    if given.train_batch_size is None:
        chosen["train_micro_batch_size_per_gpu"] = DEFAULT_MICRO_BATCH_SIZE
        chosen["gradient_accumulation_steps"] = DEFAULT_NUM_MICRO_BATCHES
    return Config.from_layers(layers, Layer(_CHOSEN, chosen))


def _hyper_parameters(given: Config, model: str) -> dict[str, object]:
    """Choose those of Adam, which are known to train these models; every other rule keeps its own defaults."""
    num_parameters = parameter_count(preset(model))
    if not given.optimizer.is_native:
        return {}
    return {
        "optimizer.params.lr": _learning_rate(num_parameters),
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.weight_decay": 0.1,
    }


def _schedule(given: Config, num_steps: int) -> dict[str, object]:
    """Choose the schedule, or what the given one takes from the run; DeepSpeed's keep their warm-up unless it is auto."""
    kind = given.scheduler.type if given.is_given("scheduler.type") else "cosine"
    params: dict[str, object] = {"total_num_steps": num_steps}
    if kind not in DEEPSPEED_TYPES or given.says_auto("scheduler.params.warmup_num_steps"):
        params["warmup_num_steps"] = min(_WARMUP_STEPS, num_steps // 4)
    taken = {f"scheduler.params.{name}": value for name, value in params.items() if name in PARAMS_OF_TYPE[kind]}
    return {"scheduler.type": kind, **taken}


def native_bf16(cpu_info: Path = _CPU_INFO, devices: Path = _DEVICES) -> bool:
    """Return whether a GPU is here or this CPU multiplies bf16 matrices natively; without that fp32 is the faster choice."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    try:
        words = cpu_info.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not _BF16_FLAGS.isdisjoint(words)


def check_counts(options: TrainOptions) -> None:
    """Raise ConfigError for a count below 1 or a share that leaves nothing."""
    require_at_least_one((
        ("--steps", options.steps), ("--seq-len", options.seq_len), ("--keep", options.keep),
        ("--eval-batches", options.eval_batches), ("--eval-every", options.eval_every),
        ("--checkpoint-every", options.checkpoint_every),
    ))  # fmt: skip
    if not 0 <= options.hold_out < 1:
        raise ConfigError(f"--hold-out: {options.hold_out} is no share.", remedy="Give a number from 0 to below 1.")


def require_at_least_one(counts: Iterable[tuple[str, int | None]]) -> None:
    """Raise ConfigError for the first count below 1; None is a count that was not given."""
    for name, value in counts:
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is too small.", remedy="Give at least 1.")


def _learning_rate(num_parameters: int) -> float:
    return next(rate for most, rate in _LEARNING_RATES if num_parameters <= most)
