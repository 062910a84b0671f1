"""Brings a model's initial values into their tiers, one parameter at a time: the state never exists whole in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from infinity.comm.group import Group
from infinity.errors import ModelError
from infinity.handles import Handle
from infinity.memory.arena import Buffer
from infinity.optim.reference import split_master
from infinity.store.layout import Plane, Section, ShardLayout, Tile
from infinity.store.store import Store
from infinity.zero.shard import TORCH_DTYPES
from infinity.zero.units import ParameterGroup, ParameterUse

_CHUNK_ELEMENTS = 1 << 16  # splitting a master makes some seven arrays of four bytes an element on the way

# Fills the parameters of a module that was made on the meta device; gets the module and its name in the model.
Initializer = Callable[[nn.Module, str], None]


class InitialValues:
    """The values that a model holds, and those that an initializer gives its parameters on the meta device.

    On several ranks all values are those of rank 0, whatever the others hold.
    """

    def __init__(self, initializer: Initializer | None, group: Group, device: torch.device) -> None:
        self._initializer = initializer
        self._group = group
        self._device = device  # of the group's buffers

    def value(self, use: ParameterUse) -> torch.Tensor:
        """Return the parameter's value in host memory, of any floating-point dtype. Every rank asks in the same order.

        On the meta device, its own module alone is materialised, in fp32, and initialised. Raises ModelError where nothing
        says how.
        """
        if self._group.size == 1:
            return self._own_value(use)
        if self._group.rank == 0:
            value = self._own_value(use).to(self._device, torch.float32).contiguous()  # exact for all that is trained
        else:
            value = torch.empty(use.parameter.shape, dtype=torch.float32, device=self._device)
        self._group.broadcast(value.view(-1), source=0, what=f"initial value of {use.name}").wait()
        return value.cpu()

    def share_buffers(self, model: nn.Module) -> None:
        """Let every buffer of the model, where it computes already, have the value of rank 0's."""
        if self._group.size == 1:
            return
        for name, buffer in model.named_buffers():
            value = buffer.detach().to(self._device).contiguous().clone()
            self._group.broadcast(value.view(-1), source=0, what=f"buffer {name}").wait()
            with torch.no_grad():
                buffer.copy_(value)

    def _own_value(self, use: ParameterUse) -> torch.Tensor:
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
    """Write the initial weights and optimizer state that this rank owns of a group. `staging` has room for those weights.

    The handle is done when `staging` may be used again.
    """
    uses = {use.name: use for use in group.uses}
    weights = store.weights(layout.index) or staging
    masters = {
        number: torch.zeros(section.shard_elements, dtype=TORCH_DTYPES[plane.dtype])
        for number, section in enumerate(layout.sections)
        if (plane := section.master_plane) is not None
    }
    flat = weights.tensor(torch.uint8, layout.shard_weight_bytes)
    flat.zero_()
    for number, section in enumerate(layout.sections):
        start, master = section.shard_byte_offset, masters.get(number)
        elements = flat[start : start + section.shard_elements * section.element_bytes].view(TORCH_DTYPES[section.dtype])
        for parameter, _, _ in section.parameters:  # all ranks ask for all of them
            value = values.value(uses[parameter]).reshape(-1)
            for segment in section.segments:
                if segment.parameter == parameter:
                    part = value[segment.parameter_offset : segment.parameter_offset + segment.length]
                    run = slice(segment.offset, segment.offset + segment.length)
                    _store_value(section, part, elements[run], None if master is None else master[run])
    for tile in layout.tiles:
        _publish_state(store, tile, layout.sections[tile.section].master_plane, masters.get(tile.section))
    return store.publish_weights(layout.index, weights)


def _store_value(section: Section, value: torch.Tensor, weights: torch.Tensor, master: torch.Tensor | None) -> None:
    """Round the value to the weights, and keep in `master` what its plane holds of it: what was cut off, or all."""
    for start in range(0, value.numel(), _CHUNK_ELEMENTS):
        piece = value[start : start + _CHUNK_ELEMENTS]
        rounded = kept = piece
        if section.dtype == "bfloat16" and not section.has_whole_masters:
            rounded, kept = split_master(piece.to(torch.float32))
        weights[start : start + piece.numel()].copy_(rounded)
        if master is not None:
            master[start : start + piece.numel()].copy_(kept)


def _publish_state(store: Store, tile: Tile, plane: Plane | None, master: torch.Tensor | None) -> None:
    lease = store.new_tile(tile)  # zeros: the moments
    if plane is not None and master is not None:
        values = lease.buffer.tensor(master.dtype, tile.num_elements, tile.plane_offset(plane.name))
        values.copy_(master[tile.offset : tile.offset + tile.num_elements])
    store.publish_tile(tile, lease)
