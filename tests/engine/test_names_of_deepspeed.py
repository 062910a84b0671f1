"""Every name of the incumbent's public API is there, or refused with the reason and what does its work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import TINY_GPT, open_engine, settings

import infinity
from infinity.config import Config
from infinity.errors import ConfigError, NotOffered
from infinity.not_offered import REFUSALS

# What DeepSpeed's documentation and users' scripts name, by owner.
NAMES = {
    "infinity": """initialize add_config_arguments init_distributed init_inference tp_model_init OnDevice checkpointing zero
        utils PipelineModule moe ops pipe get_accelerator comm accelerator
        runtime DeepSpeedEngine DeepSpeedConfig DeepSpeedHybridEngine InferenceEngine version""",
    "infinity.comm": """init_distributed is_initialized is_available get_rank get_local_rank get_world_size get_global_rank
        get_all_ranks_from_group barrier monitored_barrier all_gather_object broadcast_object_list all_reduce
        inference_all_reduce all_reduce_coalesced all_gather all_gather_into_tensor all_gather_coalesced allgather_fn
        reduce_scatter reduce_scatter_tensor reduce_scatter_fn reduce broadcast gather scatter ReduceOp new_group
        get_world_group destroy_process_group initialize_mesh_device all_to_all all_to_all_single send recv isend irecv
        configure log_summary""",
    "infinity.zero": """Init GatheredParameters register_external_parameter TiledLinear TiledLinearReturnBias MiCS_Init
        unwrap_model_for_generation DeepSpeedTensorOverride ZeroParamStatus ZeroParamType
        estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold
        estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold""",
    "infinity.utils": """safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param
        safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
        safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
        safe_update_full_grad_vectorized set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules set_z3_leaf_module
        set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix z3_leaf_module z3_leaf_parameter zero_to_fp32 logger
        groups RepeatingLoader""",
    "engine": """module optimizer lr_scheduler device global_rank local_rank world_size config forward backward step scale
        no_sync coalesce_grad_reduction is_gradient_accumulation_boundary set_gradient_accumulation_boundary
        was_step_applied get_global_grad_norm get_lr get_mom get_batch_info set_train_batch_size
        set_train_micro_batch_size train eval zero_grad module_state_dict deepspeed_io get_wall_clock_timers compile destroy
        empty_partition_cache global_steps micro_steps skipped_steps global_samples offload_states reload_states
        save_checkpoint load_checkpoint save_16bit_model save_fp16_model train_batch_size train_micro_batch_size_per_gpu
        gradient_accumulation_steps zero_optimization zero_optimization_stage zero_offload_optimizer zero_offload_param
        gradient_clipping fp16_enabled bfloat16_enabled dynamic_loss_scale initial_dynamic_scale optimizer_name
        optimizer_params scheduler_name scheduler_params aio_config get_data_types""",
}


@pytest.fixture
def owners(nvme: Path) -> Iterator[dict[str, Any]]:
    """What the names belong to, an open engine among them."""
    with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
        yield {
            "infinity": infinity,
            "infinity.comm": infinity.comm,
            "infinity.zero": infinity.zero,
            "infinity.utils": infinity.utils,
            "engine": engine,
        }


def test_every_name_is_there_or_refused_with_a_reason(owners: dict[str, Any]) -> None:
    """hasattr and the table of refusals are each other's complement, and each refusal is a typed error with a remedy."""
    for owner, names in NAMES.items():
        for name in names.split():
            assert hasattr(owners[owner], name) != (name in REFUSALS[owner]), f"{owner}.{name}"
        assert set(REFUSALS[owner]) <= set(names.split())
        for name, reason in REFUSALS[owner].items():
            with pytest.raises(NotOffered, match=rf"{owner}\.{name} is not offered") as caught:
                getattr(owners[owner], name)
            assert reason in caught.value.remedy
            assert isinstance(caught.value, ConfigError)


def test_other_names_are_plain_attribute_errors(owners: dict[str, Any]) -> None:
    """A slip of the pen is Python's own error, and no refusal."""
    for owner in owners.values():
        with pytest.raises(AttributeError) as caught:
            _ = owner.no_such_name
        assert not isinstance(caught.value, NotOffered)


def test_a_getter_of_the_configuration_names_where_the_value_is() -> None:
    """Every path that a refusal gives into engine.config exists there."""
    found = [reason.split(" ")[0] for reason in REFUSALS["engine"].values() if reason.startswith("engine.config.")]
    assert len(found) > 10
    for path in found:
        value: Any = Config.from_any({})
        for name in path.split(".")[2:]:
            value = getattr(value, name)


def test_refusals_need_no_torch() -> None:
    """A script that asks for what is not there learns it without torch being loaded."""
    code = (
        "import sys, infinity\n"
        "try:\n    infinity.init_inference\n"
        "except infinity.InfinityError as error:\n    print(error)\n"
        "try:\n    infinity.comm.barrier()\n"
        "except infinity.InfinityError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("infinity.init_inference is not offered.")
    assert "infinity.comm.barrier is not offered." in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [("SGD", {"momentum": 0.9}, [0.9]), ("RMSprop", {}, [0]), ("Adagrad", {}, [None]), ("Lion", {}, [(0.9, 0.99)])],
)
def test_the_momentum_of_other_optimizers(nvme: Path, name: str, params: dict[str, Any], expected: list[Any]) -> None:
    """get_mom gives what an optimizer has in the place of betas."""
    config = {**settings(nvme, bf16=False), "optimizer": {"type": name, "params": {"lr": 0.01, **params}}}
    with open_engine(TINY_GPT.build(), config) as engine:
        assert engine.get_mom() == expected


def test_the_ways_of_importing_agree() -> None:
    """`from infinity.utils import name`, as scripts of ZeRO's users have it, gives what infinity.utils.name is."""
    code = (
        "from infinity.utils import safe_get_full_grad\nfrom infinity.zero import Init\nimport infinity\n"
        "print(infinity.utils.safe_get_full_grad is safe_get_full_grad and infinity.zero.Init is Init)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_what_users_ask_of_an_engine(nvme: Path) -> None:
    """Batch arithmetic, counters, betas and weights under their known names."""
    config = settings(nvme, bf16=False, num_micro_batches=3)
    engine = open_engine(TINY_GPT.build(), config)
    for batch in TINY_GPT.batches(0, 3):
        engine.backward(engine(*batch))
        engine.step()
    assert engine.get_batch_info() == (6, 2, 3)
    assert (engine.global_samples, engine.micro_steps) == (6, 3)
    assert engine.get_mom() == [(0.9, 0.999)]
    weights = engine.module_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in engine.state_dict().items())
    engine.destroy()
    with pytest.raises(infinity.InfinityError, match="CLOSED"):
        engine.step()
