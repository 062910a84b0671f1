"""DeepSpeed's keys that no section holds: what each means here, so that none is silently ignored.

A key is in one of three places. Keys with an effect are fields of a section. `ALIASES` are other names of such fields.
`KNOWN` are accepted with a note that says what does their work, and refused where a value asks for something else.
Names and defaults: DeepSpeed's public configuration reference.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIASES = {"bfloat16": "bf16"}
# Misspellings that DeepSpeed's own documents and tools spread; they name the key that is meant.
MISTAKEN = {
    "aio.thread_count": "aio.queue_depth",
    "aio.num_threads": "aio.queue_depth",
    "optimizer.params.max_grad_norm": "gradient_clipping",
    "optimizer.params.adamw_mode": "optimizer.params.adam_w_mode",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key without a field: its type, what to say, and the values that are accepted (None: every value)."""

    kind: type | tuple[type, ...]
    note: str
    accepted: tuple[object, ...] | None = None


def _refused(note: str, *accepted: object, kind: type | tuple[type, ...] = bool) -> KnownKey:
    return KnownKey(kind, note, accepted)


_NUMBER = (int, float)
_OVERLAP = "has no effect because reads, gathers, reductions and writes always overlap with compute"
_BUCKETS = "has no effect because a whole unit is gathered and reduced at once"
_PLANNED = "has no effect because the planner decides what stays resident within infinity.cpu_memory and infinity.gpu_memory"
_TILES = (
    "has no effect because state streams in tiles; infinity.tile_bytes and infinity.tile_slots set their size and number"
)
_PIPELINE = "has no effect because the update is always a pipeline of reads, Adam and writes"
_RING = "has no effect because aio.queue_depth alone says how many requests are in flight"
_FP32_SUMS = "has no effect because gradients are summed over ranks in fp32 and rounded once"
_ONE_WAY = "has no effect because a unit is always gathered from its parts and reduced into its parts"
_MONITOR = "has no effect because metrics are written as JSON lines"
_QUANTISED = "is not supported: nothing is quantised"
_LATER = "is not supported in this release"

KNOWN: dict[str, KnownKey] = {
    # top level
    "managed_gradient_accumulation": _refused("is always on", True),
    "zero_allow_untested_optimizer": KnownKey(bool, "has no effect because any optimizer of torch is taken"),
    "zero_force_ds_cpu_optimizer": KnownKey(bool, "has no effect because one Adam kernel serves every tier"),
    "seq_parallel_communication_data_type": KnownKey(str, "has no effect because no sequence is split over ranks"),
    "prescale_gradients": KnownKey(bool, _FP32_SUMS),
    "gradient_predivide_factor": KnownKey(_NUMBER, _FP32_SUMS),
    "gradient_allreduce_op": _refused("supports only the mean over ranks", "mean", kind=str),
    "sparse_gradients": _refused("is not supported: gradients are dense", False),
    "disable_allgather": _refused("is not supported", False),
    "steps_per_print": KnownKey((int, float, type(None)), "has no effect because every step is shown"),
    "dump_state": KnownKey(bool, "has no effect because the resolved configuration is always saved"),
    "wall_clock_breakdown": KnownKey(bool, "has no effect because step times are always in the metrics"),
    "memory_breakdown": KnownKey(bool, "has no effect because the memory report is always kept"),
    "log_level": KnownKey(str, "has no effect because the program that logs sets the level"),
    "vocabulary_size": KnownKey(_NUMBER, "has no effect because the model says it"),
    "graph_harvesting": _refused(_LATER, False),
    "use_data_before_expert_parallelism": _refused(_LATER, False),
    "sequence_parallel_size": _refused(_LATER, 1, kind=int),
    "data_parallel_size": _refused(_LATER, 1, kind=int),
    # optimizer
    "optimizer.legacy_fusion": KnownKey(bool, "has no effect because there is one Adam kernel"),
    "optimizer.params.torch_adam": KnownKey(bool, "has no effect because the Adam kernel agrees with torch's"),
    "optimizer.params.bias_correction": _refused("is always on", True),
    "optimizer.params.amsgrad": _refused("is not supported", False),
    "optimizer.params.fp32_optimizer_states": _refused("is always on", True),
    # scheduler
    "scheduler.params.last_batch_iteration": _refused(
        "is not supported: a checkpoint holds the position of the schedule", -1, kind=int
    ),
    "scheduler.params.decay_mom_rate": _refused("is not supported: momentum would grow past 1", 0, kind=_NUMBER),
    # precision
    "fp16.auto_cast": _refused("is not supported: inputs keep the dtype that they are given", False),
    "fp16.fp16_master_weights_and_grads": _refused("is not supported: the master weights are fp32", False),
    "bf16.immediate_grad_update": KnownKey(bool, "has no effect because gradients are summed in fp32 as they are made"),
    "bf16.check_grad_overflow": KnownKey(bool, "has no effect because every gradient is checked to be finite"),
    "bf16.bf16_master_weights_and_grads": _refused("is not supported: the master weights are fp32", False),
    "bf16.bf16_optimizer_states": _refused("is not supported: the moments are fp32", False),
    "data_types.param_dtype": _refused("is set by bf16.enabled and fp16.enabled", None, kind=(str, type(None))),
    "data_types.buffer_dtype": _refused("is not supported: buffers keep their dtype", None, kind=(str, type(None))),
    # zero_optimization
    "zero_optimization.contiguous_gradients": KnownKey(
        bool, "has no effect because a unit's gradients are always contiguous"
    ),
    "zero_optimization.reduce_scatter": KnownKey(bool, _ONE_WAY),
    "zero_optimization.reduce_bucket_size": KnownKey(_NUMBER, _BUCKETS),
    "zero_optimization.use_multi_rank_bucket_allreduce": KnownKey(bool, _BUCKETS),
    "zero_optimization.allgather_partitions": KnownKey(bool, _BUCKETS),
    "zero_optimization.allgather_bucket_size": KnownKey(_NUMBER, _BUCKETS),
    "zero_optimization.overlap_comm": KnownKey((bool, type(None)), _OVERLAP),
    "zero_optimization.load_from_fp32_weights": KnownKey(bool, "has no effect because masters are made from what is loaded"),
    "zero_optimization.elastic_checkpoint": KnownKey(bool, "has no effect because checkpoints fit any number of ranks"),
    "zero_optimization.round_robin_gradients": KnownKey(bool, "has no effect because every rank owns a part of every unit"),
    "zero_optimization.ignore_unused_parameters": _refused("is always on; unused parameters are counted", True),
    "zero_optimization.legacy_stage1": _refused("is not supported", False),
    "zero_optimization.sub_group_size": KnownKey(_NUMBER, _TILES),
    "zero_optimization.prefetch_bucket_size": KnownKey(
        _NUMBER, "has no effect; infinity.weight_slots sets the depth of prefetch"
    ),
    "zero_optimization.model_persistence_threshold": KnownKey(_NUMBER, _PLANNED),
    "zero_optimization.max_live_parameters": KnownKey(_NUMBER, _PLANNED),
    "zero_optimization.max_reuse_distance": KnownKey(_NUMBER, _PLANNED),
    "zero_optimization.gather_16bit_weights_on_model_save": KnownKey(
        bool, "has no effect because weights are saved one unit at a time"
    ),
    "zero_optimization.module_granularity_threshold": KnownKey(_NUMBER, "has no effect; infinity.units names the units"),
    "zero_optimization.use_all_reduce_for_fetch_params": KnownKey(bool, _ONE_WAY),
    "zero_optimization.allgather_sequential": KnownKey(bool, _ONE_WAY),
    "zero_optimization.leaf_module": KnownKey(dict, "has no effect; infinity.units names the units"),
    "zero_optimization.memory_efficient_linear": KnownKey(bool, "has no effect because units are rerun in backward"),
    "zero_optimization.override_module_apply": KnownKey(bool, "has no effect because units are initialised one by one"),
    "zero_optimization.pipeline_loading_checkpoint": KnownKey(bool, "has no effect because loading streams tile by tile"),
    "zero_optimization.log_trace_cache_warnings": KnownKey(bool, "has no effect because there is no trace cache"),
    "zero_optimization.enable_sanity_checks": KnownKey(bool, "has no effect; infinity.check compares reruns in bits"),
    "zero_optimization.zero_hpz_partition_size": _refused(_LATER, 1, kind=int),
    "zero_optimization.zero_quantized_weights": _refused(_QUANTISED, False),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(_QUANTISED, False),
    "zero_optimization.zero_quantized_gradients": _refused(_QUANTISED, False),
    "zero_optimization.zeropp_loco_param": _refused(_QUANTISED, None, kind=(dict, type(None))),
    "zero_optimization.mics_shard_size": _refused(_LATER, -1, kind=int),
    "zero_optimization.mics_hierarchical_params_gather": _refused(_LATER, False),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _refused(_LATER, False),
    "zero_optimization.zenflow": _refused("is not supported: it changes the result", None, kind=(dict, type(None))),
    "zero_optimization.cpu_offload": _refused("is an old name; write offload_optimizer: {device: cpu}", False),
    "zero_optimization.cpu_offload_param": _refused("is an old name; write offload_param: {device: cpu}", False),
    "zero_optimization.cpu_offload_use_pin_memory": _refused(
        "is an old name; write pin_memory in the offload sections", False
    ),
    "zero_optimization.offload_optimizer.buffer_count": KnownKey(_NUMBER, _TILES),
    "zero_optimization.offload_optimizer.pipeline_read": KnownKey(bool, _PIPELINE),
    "zero_optimization.offload_optimizer.pipeline_write": KnownKey(bool, _PIPELINE),
    "zero_optimization.offload_optimizer.pipeline": KnownKey(bool, _PIPELINE),
    "zero_optimization.offload_optimizer.fast_init": KnownKey(
        bool, "has no effect because state is always made tile by tile"
    ),
    "zero_optimization.offload_optimizer.super_offload": _refused(_LATER, False),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": KnownKey(
        _NUMBER, "has no effect because Adam has its own thread count"
    ),
    "zero_optimization.offload_param.buffer_count": KnownKey(
        _NUMBER, "has no effect; infinity.weight_slots sets the number of gathered units"
    ),
    "zero_optimization.offload_param.buffer_size": KnownKey(_NUMBER, "has no effect because slots fit the largest unit"),
    "zero_optimization.offload_param.max_in_cpu": KnownKey(_NUMBER, _PLANNED),
    # aio
    "aio.intra_op_parallelism": KnownKey(int, _RING),
    "aio.single_submit": KnownKey(bool, _RING),
    "aio.overlap_events": KnownKey(bool, _RING),
    "aio.use_gds": _refused("is not supported: data passes through pinned host memory", False),
    # whole sections
    "activation_checkpointing": KnownKey(
        dict, "has no effect; absent units are always rerun, infinity.recompute adds the others"
    ),
    "timers": KnownKey(dict, _MONITOR),
    "checkpoint": KnownKey(dict, "has no effect because checkpoints are written unit by unit and committed by a manifest"),
    "comms_logger": KnownKey(dict, _MONITOR),
    "tensorboard": KnownKey(dict, _MONITOR),
    "wandb": KnownKey(dict, _MONITOR),
    "comet": KnownKey(dict, _MONITOR),
    "csv_monitor": KnownKey(dict, _MONITOR),
    "flops_profiler": KnownKey(dict, _MONITOR),
}

# The keys of sections that are known as a whole.
INNER_KEYS: dict[str, tuple[str, ...]] = {
    "activation_checkpointing": (
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    ),
    "timers": ("throughput",),
    "checkpoint": (
        "tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "checkpoint_serialization", "writer",
    ),
    "comms_logger": ("enabled", "verbose", "prof_all", "debug", "prof_ops"),
    "tensorboard": ("enabled", "output_path", "job_name"),
    "wandb": ("enabled", "group", "team", "project"),
    "comet": (
        "enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key", "online",
        "mode",
    ),
    "csv_monitor": ("enabled", "output_path", "job_name"),
    "flops_profiler": (
        "enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
    ),
    "zero_optimization.leaf_module": ("classes", "names", "name_suffixes"),
}  # fmt: skip

# Sections that change training or the run: accepted only while they are switched off.
SWITCHED_SECTIONS = (
    "amp", "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency", "datastates",
    "eigenvalue", "elasticity", "expert_parallel", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop",
    "sparse_attention", "tensor_parallel", "torch_autocast", "weight_quantization",
)  # fmt: skip

# zero_optimization accepts each of these with and without the prefix.
STAGE3_PREFIXED = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
ALIASES |= {f"zero_optimization.stage3_{name}": f"zero_optimization.{name}" for name in STAGE3_PREFIXED}
ALIASES["zero_optimization.stage3_gather_fp16_weights_on_model_save"] = (
    "zero_optimization.gather_16bit_weights_on_model_save"
)
