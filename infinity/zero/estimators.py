"""The memory of model states under the names of ZeRO's estimators; they return the table that is to be printed.

The figures are the incumbent's own formulas (`placement/zero_memory.py`), for those who compare: 16-bit weights and
gradients, fp32 Adam, no activations. What infinity takes is in its plan, which also knows NVMe.
"""

from __future__ import annotations

from torch import nn

from infinity.placement.zero_memory import EstimatedNeeds, estimate_zero2_needs, estimate_zero3_needs

_GIB = 1 << 30


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """Return the table of stage 2 for a model that exists, on the meta device or not."""
    return estimate_zero2_model_states_mem_needs_all_cold(
        _num_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """Return the table of stage 2 for so many parameters: host memory per node, GPU memory per GPU, for each option."""
    lines = [_head(total_params, num_gpus_per_node, num_nodes)]
    for offloads in (True, False):
        needs = estimate_zero2_needs(
            total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes, cpu_offload=offloads,
            additional_buffer_factor=additional_buffer_factor,
        )  # fmt: skip
        lines.append(_line(needs, f"offload_optimizer={_device(offloads)}"))
    return "\n".join(lines)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> str:
    """Return the table of stage 3 for a model that exists, on the meta device or not."""
    largest = max((sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()), default=0)
    return estimate_zero3_model_states_mem_needs_all_cold(
        _num_parameters(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> str:
    """Return the table of stage 3 for so many parameters, of which the largest layer has so many."""
    lines = [_head(total_params, num_gpus_per_node, num_nodes)]
    for optimizer, params in _OFFLOADS:
        for zero_init in (True, False):
            needs = estimate_zero3_needs(
                total_params, largest_layer_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes,
                cpu_offload=optimizer, cpu_offload_params=params, zero_init=zero_init,
                additional_buffer_factor=additional_buffer_factor,
            )  # fmt: skip
            words = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}, zero_init={int(zero_init)}"
            lines.append(_line(needs, words))
    return "\n".join(lines)


_OFFLOADS = ((True, True), (True, False), (False, False))


def _device(offloads: bool) -> str:
    return "cpu" if offloads else "none"


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones once


def _head(num_parameters: int, num_gpus_per_node: int, num_nodes: int) -> str:
    return (
        f"Model states of {num_parameters / 1e6:.0f}M parameters on {num_nodes} nodes with {num_gpus_per_node} GPUs each\n"
        f"{'per CPU':>12} | {'per GPU':>12} | options"
    )


def _line(needs: EstimatedNeeds, options: str) -> str:
    return f"{needs.cpu_bytes / _GIB:>8.2f} GiB | {needs.gpu_bytes / _GIB:>8.2f} GiB | {options}"
