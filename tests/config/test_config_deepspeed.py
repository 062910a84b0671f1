"""Configurations as DeepSpeed's users write them are read unchanged, and no key of them is silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.config import Config
from infinity.config.config import SCHEMA

STAGE3_NVME = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
            "pipeline_read": True,
            "pipeline_write": True,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}

STAGE3_CPU = {
    "train_batch_size": 16,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 1000000000.0,
        "reduce_bucket_size": 10000000.0,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}

STAGE2 = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "bfloat16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "offload_optimizer": None,
    },
    "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
    "flops_profiler": {"enabled": False},
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
}

# The form that trainers fill in: loss scale, a decaying schedule, and buckets that follow the model.
ALL_AUTO = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "amp": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "last_batch_iteration": -1,
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

FP16_SCALE = {
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 15,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}

FP16_DYNAMIC = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": FP16_SCALE,
    "zero_optimization": {"stage": 0, "cpu_offload": False},
}


def leaf_keys(values: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path.replace("bfloat16", "bf16") in SCHEMA.sections:
            keys += leaf_keys(value, f"{path}.")
        elif value != "auto" and value is not None:
            keys.append(path.replace("bfloat16", "bf16").replace("stage3_", ""))
    return keys


GUIDES: dict[str, dict[str, object]] = {
    "stage3-nvme": STAGE3_NVME,
    "stage3-cpu": STAGE3_CPU,
    "stage2": STAGE2,
    "all-auto": ALL_AUTO,
    "fp16-off": FP16_DYNAMIC,
    "fp16-dynamic": {**FP16_DYNAMIC, "fp16": {**FP16_SCALE, "enabled": True}},
}


@pytest.mark.parametrize("values", GUIDES.values(), ids=GUIDES)
def test_published_forms_are_read_and_every_key_is_accounted_for(values: dict[str, object]) -> None:
    """Every given key is either in force with its source, or has a note."""
    config = Config.from_any(values)
    sources, notes = config.sources(), config.notes()
    for key in leaf_keys(values):
        assert (key in sources and sources[key].source == "config") or any(note.startswith(f"{key}: ") for note in notes), (
            key
        )


def test_stage_three_on_nvme_means_what_it_says() -> None:
    """The offload sections, aio and `auto` values of a stage 3 NVMe configuration arrive."""
    config = Config.from_any(STAGE3_NVME)
    zero = config.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == (3, "nvme", "nvme")
    assert config.nvme_directories == (Path("/local_nvme"),)
    assert (config.aio.block_size, config.aio.queue_depth) == (262144, 32)
    assert (config.gradient_clipping, config.optimizer.params.lr) == (1.0, 1e-3)


def test_auto_of_a_key_without_a_field_is_said() -> None:
    """Buckets that a trainer would compute from the model, and switches, get their line when they say auto, too."""
    notes = Config.from_any({**ALL_AUTO, "sparse_gradients": "auto"}).notes()
    assert any(note.startswith("zero_optimization.reduce_bucket_size: has no effect") for note in notes)
    assert "sparse_gradients: auto is false." in notes


def test_a_peak_in_the_scheduler_wins_and_is_said() -> None:
    """C81: warmup_max_lr beside an optimizer's lr is printed as what counts; alone, or null, it needs no word."""
    [note] = [note for note in Config.from_any(FP16_DYNAMIC).notes() if note.startswith("optimizer.params.lr")]
    assert note == "optimizer.params.lr: has no effect because scheduler.params.warmup_max_lr 0.001 is given."
    quiet = {"optimizer": {"params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": None}}}
    assert Config.from_any(quiet).notes() == ()


def test_loss_scale_without_fp16_is_said_where_it_asks_for_something() -> None:
    """Keys of fp16 that differ from their defaults have a note while fp16 is off."""
    notes = [note for note in Config.from_any(FP16_DYNAMIC).notes() if note.startswith("fp16.")]
    off = [f"fp16.{name}: has no effect because fp16 is off." for name in ("initial_scale_power", "loss_scale_window")]
    assert [note for note in notes if "fp16 is off" in note] == off


def test_section_set_to_null_is_absent() -> None:
    """A section that is null has its defaults."""
    assert Config.from_any(STAGE2).zero_optimization.offload_optimizer.device == "auto"
