"""The memory of ZeRO's model states as the literature counts it, and as the incumbent's estimators do; pure arithmetic.

Rajbhandari et al., 2020: mixed-precision Adam takes 2 bytes a parameter for weights, 2 for gradients and K = 12 for the
optimizer (fp32 master and two moments); what a stage partitions falls as 1/N. What infinity takes is in `estimate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.placement.stages import is_partitioned
from infinity.states import StateKind

TEXTBOOK_BYTES: Mapping[StateKind, int] = {StateKind.PARAM: 2, StateKind.GRAD: 2, StateKind.OPTIM: 12}  # per parameter

# The incumbent's factors, in bytes per parameter.
_WEIGHT, _FP32, _LAYER = 2, 4, 4  # a layer being used: its weights and their gradients
_SPREAD = 18  # what falls as 1/N: gradients in 16 and in 32 bits, fp32 master, two moments
_ON_HOST, _ON_HOST_WITH_WEIGHTS = 16, 18


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each model state on one rank."""

    params: float
    grads: float
    optim: float

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optim


@dataclass(frozen=True, slots=True)
class EstimatedNeeds:
    """Bytes of host memory per node and of GPU memory per GPU, as the incumbent's estimators give them."""

    cpu_bytes: int
    gpu_bytes: int
    largest_layer_bytes: int = 0  # stage 3: part of `gpu_bytes`


def state_bytes(num_parameters: int, stage: int, num_ranks: int, element_bytes: Mapping[StateKind, int]) -> StateBytes:
    """Return the bytes of model states on one rank at so many bytes per parameter, without padding or buffers."""

    def on_one_rank(kind: StateKind) -> float:
        return num_parameters * element_bytes[kind] / (num_ranks if is_partitioned(stage, kind) else 1)

    return StateBytes(on_one_rank(StateKind.PARAM), on_one_rank(StateKind.GRAD), on_one_rank(StateKind.OPTIM))


def textbook_bytes(num_parameters: int, stage: int, num_ranks: int) -> StateBytes:
    """Return the textbook's bytes of model states on one rank: (2 + 2 + 12) per parameter before partitioning."""
    return state_bytes(num_parameters, stage, num_ranks, TEXTBOOK_BYTES)


def estimate_zero2_needs(
    num_parameters: int,
    *,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> EstimatedNeeds:
    """Return what `estimate_zero2_model_states_mem_needs` gives: stage 2, optimizer and gradients on the CPU or not.

    The incumbent's formulas, for those who compare; they count no activations, and infinity takes less.
    """
    num_gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        gpu_bytes = _WEIGHT * num_parameters
        host_factor = max(_FP32 * num_gpus, _ON_HOST)
    else:
        gpu_bytes = _WEIGHT * num_parameters + int(_SPREAD * num_parameters / num_gpus)
        host_factor = _FP32 * num_gpus_per_node  # every process loads the model on its own
    return EstimatedNeeds(int(num_parameters * host_factor * additional_buffer_factor), gpu_bytes)


def estimate_zero3_needs(
    num_parameters: int,
    largest_layer_parameters: int,
    *,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> EstimatedNeeds:
    """Return what `estimate_zero3_model_states_mem_needs` gives: stage 3, optimizer and perhaps weights on the CPU or not.

    Without `zero_init` every process holds the whole model in fp32 while it is made. `cpu_offload_params` counts only with
    `cpu_offload`, as there.
    """
    num_gpus = num_gpus_per_node * num_nodes
    layer_bytes = _LAYER * largest_layer_parameters
    loaded_factor = _FP32 * num_gpus_per_node
    if cpu_offload:
        on_gpu = 0 if cpu_offload_params else int(_WEIGHT * num_parameters / num_gpus)
        held_factor = (_ON_HOST_WITH_WEIGHTS if cpu_offload_params else _ON_HOST) / num_nodes
        host_bytes = num_parameters * (held_factor if zero_init else max(loaded_factor, held_factor))
    else:
        on_gpu = int(_SPREAD * num_parameters / num_gpus)
        host_bytes = (largest_layer_parameters if zero_init else num_parameters) * loaded_factor
    return EstimatedNeeds(int(host_bytes * additional_buffer_factor), layer_bytes + on_gpu, layer_bytes)
