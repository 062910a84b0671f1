"""Everything that can be known before anything heavy starts: counts, data, paths, space, memory, I/O engine; torch-free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.select import Probe, probe
from infinity.byte_sizes import format_bytes
from infinity.checkpoint.completeness import latest, verify
from infinity.checkpoint.manifest import MANIFEST, read_manifest
from infinity.comm.launched import ONE_RANK, Ranks
from infinity.config import BatchSizes, Config
from infinity.data.corpus import Corpus, open_corpus, require_sequences, standard_library
from infinity.errors import CheckpointError, ConfigError, DoesNotFit, StorageError, SwapSpaceError
from infinity.memory.limits import HostLimit, host_limit_bytes
from infinity.models.presets import GPTConfig, parameter_count, preset
from infinity.placement.stages import PARTITIONED, is_partitioned
from infinity.states import StateKind
from infinity.store.checks import DirectoryFacts, check_directory, require_distinct
from infinity.store.directory import remove_dead_runs
from infinity.train.options import TrainOptions, check_counts
from infinity.train.output import Output, check_output, default_output
from infinity.train.reporter import Reporter
from infinity.train.voice import Voice

# Bytes a parameter: weights; and the optimizer's: of the master what the weights do not hold, and two moments.
_WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_OPTIMIZER_BYTES = {"bf16": 2 + 8, "fp16": 4 + 8, "fp32": 8}  # of Adam
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run is about, wherever it runs."""

    gpt: GPTConfig
    batch: BatchSizes
    corpus: Corpus
    eval_corpus: Corpus | None


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that may start, and what was found out about its surroundings."""

    options: TrainOptions
    gpt: GPTConfig
    batch: BatchSizes
    corpus: Corpus
    eval_corpus: Corpus | None
    output: Output
    resume_from: Path | None
    directories: tuple[DirectoryFacts, ...]
    probes: Mapping[Path, Probe]  # of these directories, by path
    host_limit: HostLimit
    undo: ExitStack  # removes the NVMe directories that were made for this run, where they are empty
    ranks: Ranks
    notes: tuple[str, ...]  # what was said so far

    @property
    def config(self) -> Config:
        return self.options.config


def check_wanted(options: TrainOptions, num_ranks: int) -> Wanted:
    """Check what every rank would find alike: counts, stage, model, batch and data. Raises ConfigError and DataError."""
    check_counts(options)
    _require_a_stage_of_weights(options.config, num_ranks)
    gpt, batch = preset(options.model), options.config.batch(num_ranks)
    corpus, eval_corpus = _open_data(options)
    return Wanted(gpt, batch, corpus, eval_corpus)


def _require_a_stage_of_weights(config: Config, num_ranks: int) -> None:
    """Raise ConfigError for weights on NVMe in a stage where every rank has them all, as the plan would later."""
    zero = config.zero_optimization
    asked = zero.stage
    if num_ranks == 1 or asked is None or zero.offload_param.device != "nvme":
        return
    if not is_partitioned(asked, StateKind.PARAM):
        raise ConfigError(
            f"Weights are to live on NVMe, but in stage {asked} each of {num_ranks} ranks computes with all of them "
            "where they are.",
            remedy="Choose --stage 3, which partitions weights, or leave offload_param (--offload-params) at auto.",
        )


def check_run(options: TrainOptions, reporter: Reporter, ranks: Ranks = ONE_RANK) -> Checked:
    """Check what `options` ask for and say what was chosen or is not available.

    Every rank checks for itself; what the ranks of a machine share (its memory and disks) is checked by one of them.
    Raises ConfigError, DataError, DoesNotFit, StorageError, SwapSpaceError, CheckpointError; then nothing is left behind.
    """
    wanted = check_wanted(options, ranks.world_size)
    reporter = voice = Voice(reporter)
    for note in options.config.notes():
        reporter.note(note)
    output = Output(options.output) if options.output else default_output(options.model)
    if ranks.speaks:
        check_output(output)
        _check_trace(options.trace)
    resume_from = _find_checkpoint(options.resume, output, reporter)
    limit = host_limit_bytes()
    with ExitStack() as undo:
        directories = tuple(_check_nvme(path, undo, reporter) for path in options.config.nvme_directories)
        require_distinct(options.config.nvme_directories)
        if ranks.speaks_for_machine:
            num_parameters, adopted_bytes = parameter_count(wanted.gpt), _adopted_bytes(resume_from)
            least = _least_bytes(options.config, num_parameters, ranks)
            _require_space(_nvme_bytes(options.config, least) - adopted_bytes, directories)
            _require_room(options, sum(least.values()) - adopted_bytes, limit, directories)
        probes = {facts.path: probe(facts.path, options.config.infinity.engine) for facts in directories}
        for sentence in (note for found in probes.values() for note in found.notes):
            reporter.note(sentence)
        checked = Checked(
            options=options,
            gpt=wanted.gpt,
            batch=wanted.batch,
            corpus=wanted.corpus,
            eval_corpus=wanted.eval_corpus,
            output=output,
            resume_from=resume_from,
            directories=directories,
            probes=probes,
            host_limit=limit,
            undo=undo.pop_all(),
            ranks=ranks,
            notes=tuple(voice.take_untold()),
        )
    return checked


def state_bytes(config: Config, num_parameters: int) -> int:
    """Return the bytes of weights, masters and what the optimizer keeps: those of a checkpoint, without padding."""
    if config.optimizer.is_native:
        return num_parameters * (_WEIGHT_BYTES[config.precision] + _OPTIMIZER_BYTES[config.precision])
    master_bytes = 0 if config.precision == "fp32" else _FP32_BYTES
    return num_parameters * (_WEIGHT_BYTES[config.precision] + master_bytes + _FP32_BYTES * config.optimizer.num_values)


def least_nvme_bytes(config: Config, num_parameters: int, ranks: Ranks = ONE_RANK) -> int:
    """Return the bytes that the states forced to NVMe need at least on this machine: without padding, spill, checkpoints."""
    return _nvme_bytes(config, _least_bytes(config, num_parameters, ranks))


def _least_bytes(config: Config, num_parameters: int, ranks: Ranks) -> dict[StateKind, int]:
    """Return the least bytes of weights and optimizer state on this machine: what a rank shares out counts as its part."""
    given = [one for one in (config.zero_optimization.stage,) if one is not None]
    of_kind = {StateKind.PARAM: _WEIGHT_BYTES[config.precision], StateKind.OPTIM: _OPTIMIZER_BYTES[config.precision]}
    is_shared = {kind: any(is_partitioned(stage, kind) for stage in given or PARTITIONED) for kind in of_kind}
    return {
        kind: num_parameters * size * ranks.local_world_size // (ranks.world_size if is_shared[kind] else 1)
        for kind, size in of_kind.items()
    }


def _nvme_bytes(config: Config, least: Mapping[StateKind, int]) -> int:
    zero = config.zero_optimization
    optimizer_bytes, weight_bytes = least[StateKind.OPTIM], least[StateKind.PARAM]
    return optimizer_bytes * (zero.offload_optimizer.device == "nvme") + weight_bytes * (zero.offload_param.device == "nvme")


def _open_data(options: TrainOptions) -> tuple[Corpus, Corpus | None]:
    corpus = open_corpus(options.data) if options.data else standard_library()
    eval_corpus = None
    if options.eval_data is not None:
        if options.hold_out:
            raise ConfigError("--hold-out contradicts --eval-data.", remedy="Give one of them.")
        eval_corpus = open_corpus((options.eval_data,))
        require_sequences(eval_corpus, options.seq_len, f"--eval-data {options.eval_data}")
    elif options.hold_out:
        corpus, eval_corpus = corpus.split(options.hold_out)
        require_sequences(eval_corpus, options.seq_len, "--hold-out")
    require_sequences(corpus, options.seq_len, " ".join(("--data", *map(str, options.data))))
    return corpus, eval_corpus


def _check_trace(path: Path | None) -> None:
    """Raise StorageError for a trace that could not be written when the run is over."""
    if path is None:
        return
    parent = path.absolute().parent
    if path.is_dir():
        problem = f"{path} is a directory"
    elif not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        problem = f"{parent} is no directory that may be written to"
    else:
        return
    raise StorageError(f"--trace: {problem}.", remedy="Give the path of a file in a directory of your own.")


def _find_checkpoint(resume: str, output: Output, reporter: Reporter) -> Path | None:
    if not resume:  # as a path it would be the working directory
        raise ConfigError("--resume: '' is no checkpoint.", remedy="Give auto, none or a path.")
    if resume not in ("auto", "none"):
        return _named_checkpoint(Path(resume))
    newest = latest(output.checkpoints)
    if newest.found is None and newest.passed_over and resume == "auto":
        raise CheckpointError(
            f"--resume auto: none of the checkpoints in {output.checkpoints} is complete. {' '.join(newest.passed_over)}",
            remedy="Give --resume none to train from the start, which drops the metrics so far, or the PATH of another one.",
        )
    for sentence in newest.passed_over:
        reporter.note(sentence)
    if newest.found is not None and resume == "none":
        raise ConfigError(
            f"--resume none: {output.checkpoints} holds checkpoints of an earlier run.",
            remedy="Give another --output, or --resume auto to go on from them.",
        )
    return newest.found.path if newest.found else None


def _named_checkpoint(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"--resume: {path} is {'a file' if path.exists() else 'absent'}, not a checkpoint.",
            remedy="Give a step-... directory, the directory that holds them, the --output of a run, auto or none.",
        )
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return verify(path).path
    of_run = Output(path).checkpoints
    newest = latest(of_run if of_run.is_dir() else path)
    if newest.found is None:
        raise CheckpointError(
            f"--resume: {path} holds no complete checkpoint. {' '.join(newest.passed_over)}".rstrip(),
            remedy="Give a step-... directory, the directory that holds them, the --output of a run, auto or none.",
        )
    return newest.found.path


def _check_nvme(path: Path, undo: ExitStack, reporter: Reporter) -> DirectoryFacts:
    is_new = not os.path.lexists(path)
    facts = check_directory(path)
    if is_new:
        undo.callback(_remove_if_empty, path)
    for removed in remove_dead_runs(facts.path):
        reporter.note(f"Removed {removed.path}, the swap files of a dead run: {format_bytes(removed.num_bytes)}.")
    return check_directory(path)  # with the space that this gave back


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _adopted_bytes(checkpoint: Path | None) -> int:
    """Return what a checkpoint in place has on disk: the run goes on in these files and needs no others."""
    return sum(record.num_bytes for record in read_manifest(checkpoint).swap_files) if checkpoint else 0


def _require_room(options: TrainOptions, needed_bytes: int, limit: HostLimit, directories: Iterable[DirectoryFacts]) -> None:
    """Refuse what no plan can place. A GPU does not count: what it holds has a place in RAM or on NVMe, too."""
    memory_bytes = options.config.infinity.cpu_memory or limit.num_bytes
    disk_bytes = sum(_free_by_device(directories).values())
    if needed_bytes <= memory_bytes + disk_bytes:
        return
    disk = f"the NVMe directories {format_bytes(disk_bytes)}" if options.config.nvme_directories else "no --nvme is given"
    raise DoesNotFit(
        f"{options.model}: weights and optimizer state need {format_bytes(needed_bytes)}; the memory has "
        f"{format_bytes(memory_bytes)}, {disk}.",
        remedy="Choose a smaller --model, give an --nvme directory with more room, or raise --cpu-memory.",
    )


def _free_by_device(directories: Iterable[DirectoryFacts]) -> dict[int, int]:
    return {facts.path.stat().st_dev: facts.free_bytes for facts in directories}


def _require_space(needed_bytes: int, directories: Iterable[DirectoryFacts]) -> None:
    free_bytes = sum(_free_by_device(directories).values())
    if needed_bytes > free_bytes:
        names = ", ".join(str(facts.path) for facts in directories)
        raise SwapSpaceError(
            f"NVMe directory {names}: the model's state needs {format_bytes(needed_bytes)} ({needed_bytes} bytes), "
            f"{format_bytes(free_bytes)} ({free_bytes} bytes) are free.",
            remedy="Free space, give a larger disk, or choose a smaller --model.",
        )
