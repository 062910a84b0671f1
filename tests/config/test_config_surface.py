"""The set of configuration keys is frozen here: whoever adds or removes one says so in this file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.config import Config
from infinity.config.config import SCHEMA
from infinity.config.deepspeed_keys import ALIASES, INNER_KEYS, KNOWN, SWITCHED_SECTIONS
from infinity.config.scheduler import PARAMS_OF_TYPE

# Every key with an effect, and a value that is not its default.
FIELDS: dict[str, object] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "seed": 7,
    "dataloader_drop_last": True,
    "optimizer.type": "Adam",
    "optimizer.params.lr": 0.25,
    "optimizer.params.betas": [0.8, 0.95],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.125,
    "optimizer.params.adam_w_mode": False,
    "optimizer.params.momentum": 0.5,
    "optimizer.params.dampening": 0.25,
    "optimizer.params.nesterov": True,
    "optimizer.params.lr_decay": 0.125,
    "optimizer.params.initial_accumulator_value": 0.5,
    "optimizer.params.alpha": 0.75,
    "optimizer.params.centered": True,
    "optimizer.params.rho": 0.75,
    "optimizer.params.momentum_decay": 0.5,
    "optimizer.params.decoupled_weight_decay": True,
    "optimizer.params.lambd": 0.5,
    "optimizer.params.t0": 100.0,
    "optimizer.params.etas": [0.5, 1.5],
    "optimizer.params.step_sizes": [0.25, 2.0],
    "scheduler.type": "cosine",
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "scheduler.params.min_ratio": 0.1,
    "scheduler.params.warmup_min_lr": 0.1,
    "scheduler.params.warmup_max_lr": 0.2,
    "scheduler.params.warmup_type": "linear",
    "scheduler.params.warmup_min_ratio": 0.1,
    "scheduler.params.cos_min_ratio": 0.2,
    "scheduler.params.cycle_min_lr": 0.01,
    "scheduler.params.cycle_max_lr": 0.02,
    "scheduler.params.decay_lr_rate": 0.5,
    "scheduler.params.cycle_first_step_size": 10,
    "scheduler.params.cycle_second_step_size": 20,
    "scheduler.params.cycle_first_stair_count": 2,
    "scheduler.params.cycle_second_stair_count": 3,
    "scheduler.params.decay_step_size": 4,
    "scheduler.params.cycle_momentum": False,
    "scheduler.params.cycle_min_mom": 0.7,
    "scheduler.params.cycle_max_mom": 0.95,
    "scheduler.params.lr_range_test_min_lr": 0.1,
    "scheduler.params.lr_range_test_step_size": 10,
    "scheduler.params.lr_range_test_step_rate": 2.0,
    "scheduler.params.lr_range_test_staircase": True,
    "bf16.enabled": True,
    "fp16.enabled": True,
    "fp16.loss_scale": 128.0,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 500,
    "fp16.hysteresis": 4,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 0.5,
    "data_types.grad_accum_dtype": "fp32",
    "communication_data_type": "bf16",
    "zero_optimization.stage": 3,
    "zero_optimization.param_persistence_threshold": 1000,
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_optimizer.nvme_path": ["/a", "/b"],
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_param.nvme_path": ["/c"],
    "zero_optimization.offload_param.pin_memory": False,
    "aio.block_size": 65536,
    "aio.queue_depth": 8,
    "infinity.nvme": ["/mnt/ssd"],
    "infinity.cpu_memory": 1 << 30,
    "infinity.gpu_memory": 1 << 31,
    "infinity.schedule": "horizontal",
    "infinity.gradient_reduction": "micro_batch",
    "infinity.tile_bytes": 1 << 22,
    "infinity.tile_slots": 4,
    "infinity.weight_slots": 3,
    "infinity.engine": "threads",
    "infinity.adam_threads": 3,
    "infinity.io_policy": "burst",
    "infinity.grad_dtype": "fp32",
    "infinity.max_skipped_in_a_row": 8,
    "infinity.check": True,
    "infinity.checksums": False,
    "infinity.recompute": True,
    "infinity.units": ["Block"],
    "infinity.deterministic": True,
}

_KNOWN_WITHOUT_EFFECT = """
activation_checkpointing aio.intra_op_parallelism aio.overlap_events aio.single_submit aio.use_gds
bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bf16.check_grad_overflow bf16.immediate_grad_update checkpoint
comet comms_logger csv_monitor data_parallel_size data_types.buffer_dtype data_types.param_dtype
disable_allgather dump_state flops_profiler fp16.auto_cast fp16.fp16_master_weights_and_grads
gradient_allreduce_op gradient_predivide_factor graph_harvesting log_level
managed_gradient_accumulation memory_breakdown optimizer.legacy_fusion optimizer.params.amsgrad
optimizer.params.bias_correction optimizer.params.fp32_optimizer_states optimizer.params.torch_adam prescale_gradients
scheduler.params.decay_mom_rate scheduler.params.last_batch_iteration
seq_parallel_communication_data_type sequence_parallel_size sparse_gradients steps_per_print tensorboard timers
use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions
zero_optimization.allgather_sequential zero_optimization.contiguous_gradients zero_optimization.cpu_offload
zero_optimization.cpu_offload_param zero_optimization.cpu_offload_use_pin_memory zero_optimization.elastic_checkpoint
zero_optimization.enable_sanity_checks zero_optimization.gather_16bit_weights_on_model_save
zero_optimization.ignore_unused_parameters zero_optimization.leaf_module zero_optimization.legacy_stage1
zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings
zero_optimization.max_live_parameters zero_optimization.max_reuse_distance zero_optimization.memory_efficient_linear
zero_optimization.mics_hierarchical_params_gather zero_optimization.mics_shard_size
zero_optimization.model_persistence_threshold zero_optimization.module_granularity_threshold
zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.cpuadam_cores_perc
zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline
zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write
zero_optimization.offload_optimizer.super_offload zero_optimization.offload_param.buffer_count
zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
zero_optimization.override_module_apply zero_optimization.overlap_comm
zero_optimization.pipeline_loading_checkpoint zero_optimization.prefetch_bucket_size zero_optimization.reduce_bucket_size
zero_optimization.reduce_scatter zero_optimization.round_robin_gradients
zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.sub_group_size
zero_optimization.use_all_reduce_for_fetch_params zero_optimization.use_multi_rank_bucket_allreduce
zero_optimization.zenflow zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_gradients
zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_weights
zero_optimization.zeropp_loco_param
"""
KNOWN_WITHOUT_EFFECT = _KNOWN_WITHOUT_EFFECT.split()

CYCLE = {"scheduler.type": "OneCycle", "scheduler.params.cycle_min_lr": 0.015, "scheduler.params.cycle_max_lr": 0.015}
COSINE = {"scheduler.type": "WarmupCosineLR"}
# What a key needs beside it to be legal.
COMPANIONS: dict[str, dict[str, object]] = {
    "optimizer.params.adam_w_mode": {"optimizer.type": "Adam"},
    "optimizer.params.momentum": {"optimizer.type": "SGD"},
    "optimizer.params.dampening": {"optimizer.type": "SGD"},
    "optimizer.params.nesterov": {"optimizer.type": "SGD", "optimizer.params.momentum": 0.5},
    "optimizer.params.lr_decay": {"optimizer.type": "Adagrad"},
    "optimizer.params.initial_accumulator_value": {"optimizer.type": "Adagrad"},
    "optimizer.params.alpha": {"optimizer.type": "RMSprop"},
    "optimizer.params.centered": {"optimizer.type": "RMSprop"},
    "optimizer.params.rho": {"optimizer.type": "Adadelta"},
    "optimizer.params.momentum_decay": {"optimizer.type": "NAdam"},
    "optimizer.params.decoupled_weight_decay": {"optimizer.type": "RAdam"},
    "optimizer.params.lambd": {"optimizer.type": "ASGD"},
    "optimizer.params.t0": {"optimizer.type": "ASGD"},
    "optimizer.params.etas": {"optimizer.type": "Rprop"},
    "optimizer.params.step_sizes": {"optimizer.type": "Rprop"},
    "scheduler.params.warmup_num_steps": {"scheduler.params.total_num_steps": 100},
    **{
        f"scheduler.params.{name}": {"scheduler.type": "WarmupLR"}
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_type")
    },
    **{f"scheduler.params.{name}": COSINE for name in ("warmup_min_ratio", "cos_min_ratio")},
    **{path: CYCLE for path in FIELDS if path.split(".")[-1] in PARAMS_OF_TYPE["OneCycle"]},
    **{path: {"scheduler.type": "LRRangeTest"} for path in FIELDS if "lr_range_test" in path},
    "zero_optimization.offload_optimizer.device": {"infinity.nvme": ["/mnt/ssd"]},
}


def test_keys_with_an_effect_are_frozen() -> None:
    """The fields of the sections are exactly the listed keys."""
    assert set(FIELDS) == SCHEMA.fields


def test_known_keys_without_an_effect_are_frozen() -> None:
    """The table of DeepSpeed's other keys holds exactly the listed ones, and none that is also a field."""
    assert set(KNOWN_WITHOUT_EFFECT) == set(KNOWN)
    assert not set(KNOWN) & SCHEMA.fields
    assert set(ALIASES.values()) <= set(KNOWN) | SCHEMA.fields | SCHEMA.sections
    assert set(INNER_KEYS) == {path for path, known in KNOWN.items() if known.kind is dict}
    assert not set(SWITCHED_SECTIONS) & (set(KNOWN) | SCHEMA.sections)


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_key_takes_a_value_and_keeps_it(key: str) -> None:
    """A value other than the default is kept, differs from the default, and is read back from what is saved."""
    config = Config.from_any({**COMPANIONS.get(key, {}), key: FIELDS[key]})
    sourced = config.sources()[key]
    assert sourced.value == FIELDS[key] != Config.from_any(None).sources()[key].value
    assert sourced.source == "config"
    assert Config.from_any(config.effective()).effective() == config.effective()


def test_every_field_is_read_by_somebody() -> None:
    """C135: a key that a section holds is looked up somewhere in the program; else it would be ignored in silence."""
    package = Path(infinity.__file__).parent
    tables = {package / "config" / name for name in ("deepspeed_keys.py", "scheduler.py")}
    source = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")) if path not in tables)
    assert [path for path in FIELDS if not re.search(rf"""[."']{path.rpartition(".")[2]}\b""", source)] == []


@pytest.mark.parametrize("key", sorted(KNOWN))
def test_every_known_key_is_noted_or_refused(key: str) -> None:
    """A key without an effect leaves a note that names it, with the value that is accepted."""
    known = KNOWN[key]
    kinds = known.kind if isinstance(known.kind, tuple) else (known.kind,)
    value = known.accepted[0] if known.accepted else {bool: True, int: 1, float: 1.0, str: "fp32", dict: {}}[kinds[0]]
    assert [note for note in Config.from_any({key: value}).notes() if note.startswith(f"{key}: ")]


def test_config_and_placement_load_no_torch() -> None:
    """Both rooms are pure: importing them loads neither torch nor a native module."""
    code = (
        "import sys, infinity.config, infinity.placement; print([m for m in sys.modules if m in ('torch', 'numpy', 'rich')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
