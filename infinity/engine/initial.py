"""Brings a model's initial values into their tiers, one parameter at a time: the state never exists whole in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.handles import Handle
from infinity.memory.arena import Buffer
from infinity.optim.reference import split_master
from infinity.store.layout import Section, ShardLayout, Tile
from infinity.store.store import Store
from infinity.zero.shard import TORCH_DTYPES
from infinity.zero.units import ParameterGroup, ParameterUse

_CHUNK_ELEMENTS = 1 << 16  # splitting a master makes some seven arrays of four bytes an element on the way

# Fills the parameters of a module that was made on the meta device; gets the module and its name in the model.
Initializer = Callable[[nn.Module, str], None]


class InitialValues:
    """The values that a model holds, and those that an initializer gives its parameters on the meta device."""

    def __init__(self, initializer: Initializer | None) -> None:
        self._initializer = initializer

    def value(self, use: ParameterUse) -> torch.Tensor:
        """Return the parameter's value in host memory, of any floating-point dtype.

        On the meta device, its own module alone is materialised, in fp32, and initialised. Raises ModelError where nothing
        says how.
        """
        if not use.parameter.is_meta:
            return use.parameter.detach().cpu()
        place = use.places[0]
        module, own = place.module, dict(place.module._parameters)
        name = use.name.rpartition(".")[0]
        try:
            for attribute, parameter in own.items():
                if parameter is not None:
                    values = torch.empty(parameter.shape, dtype=torch.float32)
                    module._parameters[attribute] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            self._initialise(module, name)
            filled = module._parameters[place.attribute]
        finally:
            module._parameters.update(own)
        if filled is None:
            raise ModelError(f"The initializer removed parameter {use.name}.")
        return filled.detach()

    def _initialise(self, module: nn.Module, name: str) -> None:
        if self._initializer is not None:
            self._initializer(module, name)
            return
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters().",
                remedy="Give initialize(init=...) a function (module, name) that fills its parameters.",
            )
        reset()


def fill_shard(
    store: Store, group: ParameterGroup, layout: ShardLayout, values: InitialValues, staging: Buffer
) -> Handle[None]:
    """Write a group's initial weights and optimizer state. `staging` has room for the shard's weights.

    The handle is done when `staging` may be used again.
    """
    uses = {use.name: use for use in group.uses}
    weights = store.weights(layout.index) or staging
    low = torch.zeros(layout.num_state_elements, dtype=torch.int16)
    flat = weights.tensor(torch.uint8, layout.shard_weight_bytes)
    flat.zero_()
    for section in layout.sections:
        start = section.shard_byte_offset
        elements = flat[start : start + section.shard_elements * section.element_bytes].view(TORCH_DTYPES[section.dtype])
        for segment in section.segments:
            value = values.value(uses[segment.parameter]).reshape(-1)
            value = value[segment.parameter_offset : segment.parameter_offset + segment.length]
            state_offset = section.state_offset + segment.offset
            into = elements[segment.offset : segment.offset + segment.length]
            _store_value(section, value, into, low[state_offset : state_offset + segment.length])
    for tile in layout.tiles:
        _publish_state(store, tile, low)
    return store.publish_weights(layout.index, weights)


def _store_value(section: Section, value: torch.Tensor, weights: torch.Tensor, low: torch.Tensor) -> None:
    """Round the value half-up to the weights and keep what was cut off, where the master is split."""
    for start in range(0, value.numel(), _CHUNK_ELEMENTS):
        piece = value[start : start + _CHUNK_ELEMENTS]
        if section.dtype != "bfloat16":
            weights[start : start + piece.numel()].copy_(piece)
            continue
        high, rest = split_master(piece.to(torch.float32))
        weights[start : start + piece.numel()].copy_(high)
        if section.trainable:
            low[start : start + piece.numel()].copy_(rest)


def _publish_state(store: Store, tile: Tile, low: torch.Tensor) -> None:
    lease = store.new_tile(tile)  # zeros: the moments
    if any(plane.name == "master_low" for plane in tile.planes):
        plane = lease.buffer.tensor(torch.int16, tile.num_elements, tile.plane_offset("master_low"))
        plane.copy_(low[tile.state_offset : tile.state_offset + tile.num_elements])
    store.publish_tile(tile, lease)
