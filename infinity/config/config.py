"""The whole configuration: one frozen value that knows where each of its values comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from infinity.config.aio import AioSection
from infinity.config.batch import BatchSizes, resolve_batch
from infinity.config.layers import Layer, base64_layer, file_layer
from infinity.config.optimizer import NATIVE_TYPES, OptimizerSection
from infinity.config.own import InfinitySection
from infinity.config.precision import Bf16Section, DataTypesSection, Fp16Section
from infinity.config.problems import config_error, validation_problems
from infinity.config.resolve import DEFAULT_SOURCE, Resolved, SourcedValue, resolve, schema_of
from infinity.config.scheduler import PEAK_OF_TYPE, SchedulerSection
from infinity.config.section import Count, GradDtype, Section, Seed
from infinity.config.zero import OffloadOptimizerSection, OffloadParamSection, ZeroSection
from infinity.errors import ConfigError


class Config(Section):
    """What the user asked for, under DeepSpeed's names; made by `from_any` or `from_layers`, never changed.

    Both raise ConfigError, which lists every problem: unknown keys with the nearest known one, wrong types and values,
    contradictions. Keys of DeepSpeed that have no effect here are accepted with a line in `notes`.
    """

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: float = Field(default=1.0, ge=0.0)  # global norm; 0 switches clipping off
    seed: Seed = 0
    dataloader_drop_last: bool = False  # of `initialize(training_data=...)`: whether an epoch ends with its last whole step
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection = SchedulerSection()
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: GradDtype = "fp32"  # to which a gradient is rounded before it is summed over ranks, in fp32
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    infinity: InfinitySection = InfinitySection()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _given: frozenset[str] = PrivateAttr(default=frozenset())
    _auto: frozenset[str] = PrivateAttr(default=frozenset())
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def from_any(cls, value: Mapping[str, object] | str | Path | Config | None) -> Config:
        """Return the configuration that a dict, a JSON file's path, its JSON in base64, a Config or None means."""
        if isinstance(value, Config):
            return value
        if value is None:
            return cls.from_layers(())
        if isinstance(value, str | Path):
            encoded = base64_layer(value) if isinstance(value, str) else None
            return cls.from_layers((encoded or file_layer(value),))
        if isinstance(value, Mapping):
            return cls.from_layers((Layer("config", value),))
        raise ConfigError(
            f"config: {type(value).__name__} is no configuration.",
            remedy="Give a dict, the path of a JSON file, JSON in base64 or a Config.",
        )

    @classmethod
    def from_layers(cls, layers: Sequence[Layer], chosen: Layer | None = None) -> Config:
        """Merge layers, the weakest first: file, then `--set`, then flags.

        `chosen` holds, by key path, what the program chooses where no layer gives a value or the last one says auto.
        """
        resolved = resolve(layers, SCHEMA, chosen)
        problems = list(resolved.problems)
        try:
            config = cls(**resolved.nested())  # type: ignore[arg-type]
        except ValidationError as error:
            problems += validation_problems(error, _source_texts(resolved))
        if problems:
            raise config_error(problems)
        config._sources = _source_texts(resolved)
        config._given = frozenset(resolved.given)
        config._auto = frozenset(resolved.auto_sources)
        config._notes = (*resolved.notes, *_notes(config, resolved))
        return config

    @model_validator(mode="after")
    def _check(self) -> Config:
        own, accumulate = self.infinity.grad_dtype, self.data_types.grad_accum_dtype
        if own and accumulate and own != accumulate:
            raise ValueError(
                f"infinity.grad_dtype {own} contradicts data_types.grad_accum_dtype {accumulate}; keep one of them"
            )
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16.enabled and fp16.enabled are both true; a run has one precision")
        if self.grad_dtype not in ("fp32", self.precision):
            raise ValueError(
                f"a {self.grad_dtype} gradient needs {self.grad_dtype}.enabled: this is a run in {self.precision}"
            )
        for name, section in self._offload_sections():
            if section.device == "nvme" and not self.nvme_directories:
                raise ValueError(
                    f"zero_optimization.{name}.device is nvme, but no directory is given; set its nvme_path, "
                    "infinity.nvme or --nvme"
                )
            if section.device == "nvme" and not self.optimizer.is_native:
                raise ValueError(
                    f"zero_optimization.{name}.device is nvme, but optimizer.type {self.optimizer.type} is torch's own and "
                    f"needs weights and state in memory; {' and '.join(NATIVE_TYPES)} work on every tier"
                )
        return self

    def _offload_sections(self) -> tuple[tuple[str, OffloadOptimizerSection | OffloadParamSection], ...]:
        zero = self.zero_optimization
        return ("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)

    @property
    def nvme_directories(self) -> tuple[Path, ...]:
        """The directories of everything that lives on NVMe, each once: infinity.nvme, then those of the offload sections."""
        found = list(self.infinity.nvme)
        for _, section in self._offload_sections():
            if section.device in ("auto", "nvme"):
                found += section.nvme_path
        return tuple(dict.fromkeys(found))

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The dtype of the weights that the model computes with."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def grad_dtype(self) -> GradDtype:
        """The dtype to which a finished gradient is rounded, once."""
        return self.infinity.grad_dtype or self.data_types.grad_accum_dtype or self.precision

    @property
    def pin_memory(self) -> bool:
        """Whether host buffers are pinned where there is a GPU."""
        return all(section.pin_memory for _, section in self._offload_sections())

    def batch(self, world_size: int) -> BatchSizes:
        """Return the resolved batch triple; raises ConfigError with the arithmetic where it does not come out."""
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=world_size,
        )

    def effective(self) -> dict[str, object]:
        """Return every value, nested and ready for JSON; `from_any` reads it back. None means chosen by the planner."""
        return self.model_dump(mode="json")

    def sources(self) -> dict[str, SourcedValue]:
        """Return every key path with its value and where it comes from."""
        values = self.effective()
        return {
            path: SourcedValue(_value_at(values, path), self._sources.get(path, DEFAULT_SOURCE))
            for path in sorted(SCHEMA.fields)
        }

    def resolved(self, world_size: int) -> dict[str, SourcedValue]:
        """Return what counts for a number of ranks: `sources` with the whole batch triple, without the parameters that the
        types of scheduler and optimizer lack.

        Raises ConfigError, with the arithmetic, where the triple does not come out.
        """
        batch = self.batch(world_size)
        said = f"{batch.train_batch_size} = {batch.micro_batch_size} x {batch.num_micro_batches} x {world_size} ranks"
        triple = {
            "train_batch_size": batch.train_batch_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.num_micro_batches,
        }
        params = {f"scheduler.params.{name}" for name in self.scheduler.values()}
        params |= {f"optimizer.params.{name}" for name, value in self.optimizer.params if value is not None}
        return {
            path: SourcedValue(triple[path], said) if sourced.value is None and path in triple else sourced
            for path, sourced in self.sources().items()
            if path in params or not path.startswith(("scheduler.params.", "optimizer.params."))
        }

    def is_given(self, path: str) -> bool:
        """Return whether a layer gives this key a value other than auto."""
        return path in self._given

    def says_auto(self, path: str) -> bool:
        """Return whether the last word on this key is auto."""
        return path in self._auto

    def notes(self) -> tuple[str, ...]:
        """Return one line for each given key that has no effect here or means something that its name does not say."""
        return self._notes


SCHEMA = schema_of(Config)


def _source_texts(resolved: Resolved) -> dict[str, str]:
    """Return where each value that is not a plain default comes from."""
    auto = {path: f"{DEFAULT_SOURCE} ({source} says auto)" for path, source in resolved.auto_sources.items()}
    return auto | {path: sourced.source for path, sourced in (*resolved.chosen.items(), *resolved.given.items())}


def _value_at(tree: Mapping[str, object], path: str) -> object:
    value: object = tree
    for part in path.split("."):
        value = value[part]  # type: ignore[index]
    return value


def _notes(config: Config, resolved: Resolved) -> list[str]:
    notes = []
    optimizer = config.optimizer
    if optimizer.type == "Adam" and optimizer.params.weight_decay and "optimizer.params.adam_w_mode" not in resolved.given:
        notes.append(
            "optimizer.type: Adam decays weights as AdamW does, because adam_w_mode is true unless it is set to false, "
            "as in DeepSpeed."
        )
    peak = f"scheduler.params.{PEAK_OF_TYPE.get(config.scheduler.type)}"
    if "optimizer.params.lr" in resolved.given and peak in resolved.given and resolved.given[peak].value is not None:
        notes.append(f"optimizer.params.lr: has no effect because {peak} {resolved.given[peak].value} is given.")
    params = config.scheduler.params
    if params.total_num_steps and (params.warmup_num_steps or 0) > params.total_num_steps:
        notes.append(
            f"scheduler.params.warmup_num_steps: {params.warmup_num_steps} is more than total_num_steps "
            f"{params.total_num_steps}, so that the learning rate never reaches its peak."
        )
    if not config.fp16.enabled or config.fp16.loss_scale:
        why = "fp16.loss_scale is static" if config.fp16.enabled else "fp16 is off"
        notes += [
            f"fp16.{name}: has no effect because {why}."
            for name, value in config.fp16
            if value != getattr(Fp16Section(), name) and not (config.fp16.enabled and name in ("enabled", "loss_scale"))
        ]
    own = config.infinity
    if own.gradient_reduction == "micro_batch" and own.schedule == "vertical":
        notes.append(
            "infinity.gradient_reduction: counts in the loop of forward, backward and step alone, because train_batch in "
            "vertical order reduces once a step."
        )
    if config.communication_data_type != "fp32":
        notes.append(
            f"communication_data_type: gradients are rounded to {config.communication_data_type} before they are summed "
            "over ranks, and once more when the sum is final."
        )
    for name, section in config._offload_sections():
        if section.nvme_path and section.device not in ("auto", "nvme"):
            notes.append(f"zero_optimization.{name}.nvme_path: has no effect because its device is {section.device}.")
    given = config.infinity.nvme
    notes += [
        f"infinity.nvme: {path} is given {given.count(path)} times and used once."
        for path in dict.fromkeys(given)
        if given.count(path) > 1
    ]
    if len(config.nvme_directories) > 1:
        notes.append("nvme_path: everything on NVMe is striped over all directories given, by their speed and room.")
    return notes
