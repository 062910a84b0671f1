"""Replaces a model's own parameters: by views of the weights that stay, by absent ones elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from infinity.engine.cut import CutModel
from infinity.store.layout import ParameterSpec, ShardLayout
from infinity.zero.absent import AbsentParameter
from infinity.zero.shard import TORCH_DTYPES, Residency, Shard
from infinity.zero.units import ParameterGroup
from infinity.zero.weights import Slot


def take_over(
    pieces: CutModel, residencies: Mapping[int, Residency], kept: Mapping[int, Slot], device: torch.device
) -> tuple[Shard, ...]:
    """Replace the model's own parameters: by views of the kept weights where they stay, by absent ones elsewhere."""
    shards = []
    for group, layout in zip(pieces.groups, pieces.layouts, strict=True):
        residency = residencies[layout.index]
        if residency is Residency.RESIDENT:
            outside: Mapping[str, nn.Parameter] = _resident_parameters(group, layout, kept[layout.index])
        else:
            outside = {spec.name: _absent(spec, layout.name, device) for spec in layout.specs}
        for use in group.uses:
            for place in use.places:
                place.module._parameters[place.attribute] = outside[use.name]
        shards.append(Shard(group, layout, residency, outside))
    return tuple(shards)


def _resident_parameters(group: ParameterGroup, layout: ShardLayout, slot: Slot) -> dict[str, nn.Parameter]:
    """Return the user's own parameters over the kept weights; new ones for those on the meta device."""
    views = Shard(group, layout, Residency.RESIDENT, {}).views(slot.device)
    found = {}
    for use in group.uses:
        if use.parameter.is_meta:
            found[use.name] = nn.Parameter(views[use.name], requires_grad=use.parameter.requires_grad)
        else:
            use.parameter.data = views[use.name]
            found[use.name] = use.parameter
    return found


def _absent(spec: ParameterSpec, unit: str, device: torch.device) -> AbsentParameter:
    absent: AbsentParameter = AbsentParameter.standing_for(
        spec.name, unit, spec.shape, TORCH_DTYPES[spec.dtype], device, spec.trainable
    )
    return absent
