"""`infinity train`: options onto a configuration, then the preflight, then the job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infinity.cli import options as o
from infinity.cli.failures import failures_explained
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.config import Layer

_PRECISIONS = ("bf16", "fp16", "fp32")


def train(
    nvme: o.Nvme = None,
    model: o.Model = "gpt-25m",
    data: o.Data = None,
    eval_data: o.EvalData = None,
    hold_out: o.HoldOut = 0.0,
    eval_every: o.EvalEvery = None,
    eval_batches: o.EvalBatches = 8,
    config: o.ConfigFile = None,
    set_: o.Set = None,
    num_gpus: o.NumGpus = None,
    num_ranks: o.NumRanks = None,
    seed: o.Seed = None,
    steps: o.Steps = 300,
    micro_batch_size: o.MicroBatchSize = None,
    micro_batches: o.MicroBatches = None,
    seq_len: o.SeqLen = 256,
    lr: o.Lr = None,
    lr_schedule: o.LrSchedule = None,
    warmup_steps: o.WarmupSteps = None,
    weight_decay: o.WeightDecay = None,
    grad_clip: o.GradClip = None,
    precision: o.Precision = None,
    schedule: o.Schedule = None,
    check: o.Check = None,
    stage: o.Stage = None,
    cpu_memory: o.CpuMemory = None,
    gpu_memory: o.GpuMemory = None,
    offload_optimizer: o.OffloadOptimizer = None,
    offload_params: o.OffloadParams = None,
    checksums: o.Checksums = None,
    output: o.OutputDir = None,
    checkpoint_every: o.CheckpointEvery = None,
    keep: o.Keep = 2,
    resume: o.Resume = "auto",
    save_weights: o.SaveWeights = False,
    trace: o.Trace = None,
    print_config: o.PrintConfig = False,
) -> None:
    """Train a built-in decoder on text. `--nvme DIR` alone is enough: everything else is chosen."""
    flags = locals()
    from infinity.train.stopping import stop_request

    with failures_explained(), stop_request() as stopping:
        from infinity.cli.config_listing import show_config
        from infinity.cli.display import display_of
        from infinity.cli.ranks import dead_swap_files_removed, train_on_ranks
        from infinity.comm.launched import launched_ranks
        from infinity.launch.environment import ranks_wanted
        from infinity.train.options import TrainOptions, native_bf16, resolve_config
        from infinity.train.preflight import check_run

        ranks, num_started = launched_ranks(), ranks_wanted(num_ranks, num_gpus, os.environ)
        layers = _layers(config, set_ or (), flags)
        resolved = resolve_config(layers, model=model, steps=steps, has_native_bf16=native_bf16())
        if print_config:
            if ranks.speaks:
                show_config(resolved, world_size=max(num_started, ranks.world_size))
            return
        options = TrainOptions(
            config=resolved, model=model, steps=steps, seq_len=seq_len, data=tuple(data or ()), eval_data=eval_data,
            hold_out=hold_out,
            eval_every=eval_every, eval_batches=eval_batches, output=output, checkpoint_every=checkpoint_every, keep=keep,
            resume=resume, save_weights=save_weights, trace=trace,
        )  # fmt: skip
        if num_started > 1:
            raise SystemExit(train_on_ranks(options, num_started, need_gpus=num_gpus is not None))
        with display_of(ranks) as display:
            checked = check_run(options, display, ranks)
            # OpenMP reads this when torch is loaded. Threads that spin while they wait take the cores from the threads that
            # read, write and update; on a shared machine with 2 cores sleeping ones were 4 to 7 times as fast.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            with checked.undo:
                # These load torch: not before everything cheap was checked.
                from infinity.train.assemble import open_training_engine
                from infinity.train.loop import train as run

                stopping.raise_again()
                with dead_swap_files_removed(resolved.nvme_directories):
                    summary = run(checked, display, open_training_engine)
    raise typer.Exit(summary.exit_code)


def _layers(config: Path | None, assignments: Sequence[str], flags: Mapping[str, object]) -> list[Layer]:
    """Return the user's layers, the weakest first: the file, then --set, then flags."""
    from infinity.config import file_layer, flag_layer, set_layer

    layers = [file_layer(config)] if config else []
    layers += [set_layer(assignment) for assignment in assignments]
    for name, (flag, key) in o.KEYS.items():
        value = flags[name]
        if value is not None:
            layers.append(flag_layer(flag, key, value))
    if flags["precision"] is not None:
        chosen = _precision(flags["precision"])
        layers += [flag_layer("--precision", f"{name}.enabled", name == chosen) for name in ("bf16", "fp16")]
    return layers


def _precision(name: object) -> str:
    if name not in _PRECISIONS:
        near = get_close_matches(str(name), _PRECISIONS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--precision: {name!r} is not known.", remedy=f"{hint}Known: {', '.join(_PRECISIONS)}.")
    return str(name)
