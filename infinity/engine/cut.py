"""From a model to shards: what the model consists of, in the terms of the store and of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.byte_sizes import PAGE_BYTES, round_up
from infinity.comm.launched import ONE_RANK, Ranks
from infinity.config import Config
from infinity.errors import ModelError
from infinity.placement.sizes import UnitSize
from infinity.store.layout import ParameterSpec, ShardLayout
from infinity.store.unit_size import UnitLayouts, tile_elements_of, unit_layouts, unit_size
from infinity.zero.units import ParameterGroup, ParameterUse, Unit, cut_model

# Torch's names of the dtypes that the configuration knows.
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# More elements than any section has.
_WHOLE_SECTION = 1 << 48


@dataclass(frozen=True, slots=True)
class CutModel:
    """A model's units and, for each of its parameter groups, how this rank lays it out."""

    units: tuple[Unit, ...]
    groups: tuple[ParameterGroup, ...]
    unit_layouts: tuple[UnitLayouts, ...]  # by group
    tile_elements: int
    torch_values: int | None = None  # fp32 an element that an optimizer of torch is known to keep; None: it is Adam here

    @property
    def layouts(self) -> tuple[ShardLayout, ...]:
        """What this rank owns of each group: its shards."""
        return tuple(layouts.owned for layouts in self.unit_layouts)

    def sizes(self, kept_bytes: Callable[[str], int] | None = None) -> tuple[UnitSize, ...]:
        """Return what the planner knows of each group.

        `kept_bytes` gives, by unit name, what autograd keeps of one micro-batch of a unit that is not rerun.
        """
        return tuple(
            unit_size(
                layouts,
                visits=max(1, len(group.units)),
                kept_bytes=0 if kept_bytes is None or not group.units else kept_bytes(group.name),
                is_root=not group.units,
            )
            for group, layouts in zip(self.groups, self.unit_layouts, strict=True)
        )

    def notes(self) -> tuple[str, ...]:
        """Return what is to be said of the dtypes, in sentences."""
        counts = Counter(spec.dtype for layouts in self.unit_layouts for spec in layouts.whole.specs)
        if len(counts) < 2:
            return ()
        words = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(counts.items()))
        return (f"The model's parameters have several dtypes, and each keeps its own: {words}.",)

    def num_parameters(self) -> int:
        return sum(spec.numel for layouts in self.unit_layouts for spec in layouts.whole.specs)

    def buffer_bytes(self) -> int:
        """Return the bytes of everything in the units' models that is no parameter."""
        seen: dict[int, int] = {}
        for unit in self.units:
            for buffer in unit.module.buffers():
                seen[id(buffer)] = buffer.numel() * buffer.element_size()
        return round_up(sum(seen.values()), PAGE_BYTES)


def cut(
    model: nn.Module, config: Config, group_of: Callable[[nn.Parameter], int], *, stage: int = 0, ranks: Ranks = ONE_RANK,
    torch_values: int | None = None,
) -> CutModel:  # fmt: skip
    """Cut the model into units and lay out what this rank has of them; `group_of` gives a parameter's optimizer group.

    `torch_values` is that of the result: where an optimizer of torch makes the updates, a section's masters are one tile.
    Raises ModelError for a compiled model, parameters that are not floating-point numbers, and buffers without values.
    """
    _require_plain(model)
    units, groups = cut_model(model, config.infinity.units)
    dtype_of = _kept_dtypes(model, DTYPE_NAMES[config.precision])
    dtypes = {dtype_of(use.parameter) for group in groups for use in group.uses}
    tile_elements = min(tile_elements_of(config.infinity.tile_bytes, dtype) for dtype in dtypes)
    if torch_values is not None:
        tile_elements = _WHOLE_SECTION
    layouts = tuple(
        unit_layouts(
            group.index,
            group.name,
            _specs(group.uses, dtype_of, group_of, torch_values is None),
            tile_elements=tile_elements,
            stage=stage,
            num_ranks=ranks.world_size,
            rank=ranks.global_rank,
            is_root=not group.units,
            kept_elements=config.zero_optimization.param_persistence_threshold,
        )
        for group in groups
    )
    return CutModel(units, groups, layouts, tile_elements, torch_values)


def _kept_dtypes(model: nn.Module, precision: str) -> Callable[[nn.Parameter], str]:
    """Return what gives the dtype of a parameter's weights: the run's precision for all, or each parameter's own.

    They are their own where the model holds parameters of that precision and others: fp32 adapters on a bf16 decoder.
    """
    own = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if precision in own and len(own) > 1:
        return lambda parameter: str(parameter.dtype).removeprefix("torch.")
    return lambda _: precision


def _specs(
    uses: Sequence[ParameterUse],
    dtype_of: Callable[[nn.Parameter], str],
    group_of: Callable[[nn.Parameter], int],
    has_moments: bool,
) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            use.name,
            tuple(use.parameter.shape),
            dtype_of(use.parameter),
            use.parameter.requires_grad,
            group_of(use.parameter),
            has_moments,
        )
        for use in uses
    ]


def _require_plain(model: nn.Module) -> None:
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise ModelError(
            "A torch.compile'd model cannot be cut into units: its code no longer calls them.",
            remedy="Give infinity the model as it was before torch.compile.",
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"Parameter {name} has dtype {parameter.dtype}; infinity trains float32, bfloat16 and float16 parameters.",
                remedy="Convert it, or register it as a buffer if it is not trained.",
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"Parameter {name} has a gradient hook, which would never be called: others take its place in forward.",
                remedy="Remove the hook; gradient_clipping and the optimizer's settings are in the configuration.",
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"Buffer {name} is on the meta device; only parameters are filled by initialize(init=...).",
                remedy="Give it its value before initialize: make it outside torch.device('meta') or assign it anew.",
            )
