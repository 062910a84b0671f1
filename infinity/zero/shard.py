"""One rank's shard of a parameter group at run time: its layout, where its weights stay, and what stands in the modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from infinity.store.layout import ShardLayout
from infinity.store.unit_size import UnitLayouts
from infinity.zero.units import ParameterGroup

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int16": torch.int16,
}


class Residency(Enum):
    """Where the weights of a group are between the calls of its units."""

    RESIDENT = "resident"  # on the compute tier; the modules hold real parameters, updated before step() returns
    KEPT = "kept"  # on the compute tier, but updated beside the next forward; the modules hold absent parameters
    ABSENT = "absent"  # elsewhere; gathered into a slot for each visit, and gathered again for the rerun in backward


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter group, what this rank owns of it, and the parameters that the modules hold outside calls."""

    group: ParameterGroup
    layouts: UnitLayouts
    residency: Residency
    outside: Mapping[str, nn.Parameter]  # by parameter name: the real one when RESIDENT, an AbsentParameter otherwise

    @property
    def layout(self) -> ShardLayout:
        """What this rank updates, and the store holds."""
        return self.layouts.owned

    @property
    def whole(self) -> ShardLayout:
        """What is computed with."""
        return self.layouts.whole

    @property
    def index(self) -> int:
        return self.layout.index

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each parameter as a view of the gathered unit's weights; `flat` is uint8 [unit_weight_bytes]."""
        shapes = {spec.name: spec.shape for spec in self.whole.specs}
        views: dict[str, torch.Tensor] = {}
        for section in self.whole.sections:
            dtype = TORCH_DTYPES[section.dtype]
            start = section.unit_byte_offset
            elements = flat[start : start + section.unit_elements * section.element_bytes].view(dtype)
            for name, first, numel in section.parameters:
                views[name] = elements[first : first + numel].view(shapes[name])
        return views
