"""Names of DeepSpeed's API that infinity does not have: why, and what does their work. Asking for one is a typed error."""

from __future__ import annotations

from collections.abc import Mapping

from infinity.errors import NotOffered

_BATCH = "batch sizes are fixed when the engine is made; train_batch takes any number of micro-batches"
_TIERS = "states live in the tiers that the plan chose; infinity.Placement, or the offload sections, say where"
_UNITS = "units are found in the model; infinity.units of the configuration lists the modules that are to be units"
_SERVING = "infinity trains; it serves no models"
_TENSORS = "no model is split over ranks by its own code"
_EXPORT = "engine.full_parameters() and engine.state_dict() give the weights, for torch.save or safetensors"
_TYPES = "every parameter is an nn.Parameter; infinity.zero.GatheredParameters and infinity.utils reach its states"
_RANKS = (
    "engine.global_rank, local_rank and world_size say which rank this is; before there is an engine, RANK, LOCAL_RANK and "
    "WORLD_SIZE of the environment do"
)
_VALUES = "engine.group.gather(value, what=...) returns what every rank has given, once all have come"
_FLAT = "engine.group moves flat tensors between the ranks, and gather of it small values"
_OWN_GROUPS = "the engine joins its ranks itself; other groups are torch.distributed's"


def _config(path: str) -> str:
    return f"engine.config.{path} has it"


# By owner: the name in a script that says `import infinity as deepspeed` (an engine's under "engine").
REFUSALS: Mapping[str, Mapping[str, str]] = {
    "infinity": {
        "init_inference": _SERVING,
        "tp_model_init": _TENSORS,
        "OnDevice": 'with torch.device("meta") or infinity.zero.Init(...) makes a model that takes no memory',
        "checkpointing": "infinity reruns units itself, and torch.utils.checkpoint works inside them",
        "ops": "the optimizers of the configuration and those of torch are what initialize takes",
        "pipe": "a model is not split into stages; infinity.units lists the parts that are loaded one by one",
        "PipelineModule": "a model is not split into stages; infinity.units lists the parts that are loaded one by one",
        "moe": "a module that chooses among experts is trained as it is; an expert that no token chose keeps its weights",
        "get_accelerator": "engine.device is the device of compute",
        "accelerator": "engine.device is the device of compute",
        "runtime": "lr schedules are in the configuration or torch's, estimators in infinity.zero",
        "DeepSpeedEngine": "infinity.Engine is what initialize makes",
        "DeepSpeedConfig": "infinity.Config.from_any reads the configuration",
        "DeepSpeedHybridEngine": _SERVING,
        "InferenceEngine": _SERVING,
        "version": "infinity.__version__ is this package's",
    },
    "infinity.zero": {
        "register_external_parameter": _UNITS,
        "TiledLinear": "a linear layer's state is stored in tiles anyway; infinity.tile_bytes is their size",
        "TiledLinearReturnBias": "a linear layer's state is stored in tiles anyway; infinity.tile_bytes is their size",
        "MiCS_Init": "states are partitioned over all ranks; infinity.zero.Init makes the model",
        "unwrap_model_for_generation": "engine.eval() and engine(...) under torch.no_grad() evaluate the model",
        "DeepSpeedTensorOverride": _TYPES,
        "ZeroParamStatus": _TYPES,
        "ZeroParamType": _TYPES,
    },
    "infinity.utils": {
        **dict.fromkeys(
            (
                "set_z3_leaf_modules", "unset_z3_leaf_modules", "get_z3_leaf_modules", "set_z3_leaf_module",
                "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "z3_leaf_module", "z3_leaf_parameter",
            ),
            _UNITS,
        ),
        "zero_to_fp32": f"checkpoints hold whole parameters; {_EXPORT}",
        "RepeatingLoader": "loader.sampler.set_epoch(n), and iterate the loader anew in each epoch",
        "logger": "logging.getLogger is Python's",
        "groups": "all ranks share one model; engine.global_rank and engine.world_size say which this is",
    },
    "infinity.comm": {
        "init_distributed": "infinity.init_distributed is the same, and initialize joins the ranks",
        **dict.fromkeys(
            (
                "is_initialized", "is_available", "get_rank", "get_local_rank", "get_world_size", "get_global_rank",
                "get_all_ranks_from_group",
            ),
            _RANKS,
        ),
        **dict.fromkeys(("barrier", "monitored_barrier", "all_gather_object", "broadcast_object_list"), _VALUES),
        **dict.fromkeys(
            (
                "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor",
                "all_gather_coalesced", "allgather_fn", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_fn",
                "reduce", "broadcast", "gather", "scatter", "ReduceOp",
            ),
            _FLAT,
        ),
        **dict.fromkeys(
            (
                "new_group", "get_world_group", "destroy_process_group", "initialize_mesh_device", "all_to_all",
                "all_to_all_single", "send", "recv", "isend", "irecv",
            ),
            _OWN_GROUPS,
        ),
        "configure": "engine.recorder counts the bytes of collectives and has a span for each",
        "log_summary": "engine.recorder counts the bytes of collectives and has a span for each",
    },
    "engine": {
        "set_train_batch_size": _BATCH,
        "set_train_micro_batch_size": _BATCH,
        "offload_states": _TIERS,
        "reload_states": _TIERS,
        "empty_partition_cache": "nothing is cached beyond the slots that the plan counts",
        "save_16bit_model": _EXPORT,
        "save_fp16_model": _EXPORT,
        "deepspeed_io": "infinity.initialize(training_data=...) returns the data loader",
        "get_wall_clock_timers": "engine.recorder counts; infinity train --metrics writes what each step took",
        "compile": "weights of a unit come and go between its calls; compile functions inside units",
        "zero_optimization": _config("zero_optimization"),
        "zero_optimization_stage": _config("zero_optimization.stage"),
        "zero_offload_optimizer": _config("zero_optimization.offload_optimizer"),
        "zero_offload_param": _config("zero_optimization.offload_param"),
        "gradient_clipping": _config("gradient_clipping"),
        "fp16_enabled": _config("fp16.enabled"),
        "bfloat16_enabled": _config("bf16.enabled"),
        "dynamic_loss_scale": _config("fp16.loss_scale"),
        "initial_dynamic_scale": _config("fp16.initial_scale_power"),
        "optimizer_name": _config("optimizer.type"),
        "optimizer_params": _config("optimizer.params"),
        "scheduler_name": _config("scheduler.type"),
        "scheduler_params": _config("scheduler.params"),
        "aio_config": _config("aio"),
        "get_data_types": _config("data_types"),
    },
}  # fmt: skip


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for a name that `owner` does not have: NotOffered with the reason where DeepSpeed has the name."""
    reason = REFUSALS[owner].get(name)
    if reason is None:
        return AttributeError(f"{owner!r} has no attribute {name!r}")
    return NotOffered(f"{owner}.{name} is not offered.", remedy=f"Instead: {reason}.")
