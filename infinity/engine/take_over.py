"""Replaces a model's own parameters and buffers: by what the engine keeps in their stead, where it keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from weakref import WeakSet

import torch
from torch import nn

from infinity.engine.cut import CutModel
from infinity.errors import IllegalTransition, ModelError
from infinity.memory.device import ComputeDevice
from infinity.memory.ledger import Ledger
from infinity.placement import Owner
from infinity.states import Tier
from infinity.store.layout import ParameterSpec
from infinity.store.unit_size import UnitLayouts
from infinity.zero.absent import AbsentParameter
from infinity.zero.shard import TORCH_DTYPES, Residency, Shard
from infinity.zero.units import ParameterGroup
from infinity.zero.weights import Slot

# Every module whose weights an engine has, or had: they go with it.
_TAKEN: WeakSet[nn.Module] = WeakSet()


def require_own_weights(model: object) -> nn.Module:
    """Return the model; ModelError for what is no module, IllegalTransition where a part of it was given to an engine."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ModelError(f"model is {got}, not a torch.nn.Module.", remedy="Give initialize(model=...) the model itself.")
    for name, module in model.named_modules():
        if module in _TAKEN:
            part = f"its part {name!r}" if name else "it"
            raise IllegalTransition(
                f"{type(model).__name__} has no weights of its own: {part} was given to infinity.initialize before.",
                remedy="Go on with that engine, or build the model anew; engine.state_dict() has the weights before close.",
            )
    return model


def take_over(
    pieces: CutModel, residencies: Mapping[int, Residency], kept: Mapping[int, Slot], device: torch.device, undo: ExitStack
) -> tuple[Shard, ...]:
    """Replace the model's own parameters: by views of the kept weights where they stay, by absent ones elsewhere.

    `undo` gets what puts the model back as it was; it holds the values until then.
    """
    shards = []
    for group, layouts in zip(pieces.groups, pieces.unit_layouts, strict=True):
        residency = residencies[group.index]
        if residency is Residency.RESIDENT:
            outside: Mapping[str, nn.Parameter] = _resident_parameters(group, layouts, kept[group.index], undo)
        else:
            outside = {spec.name: _absent(spec, group.name, device) for spec in layouts.whole.specs}
        for use in group.uses:
            for place in use.places:
                undo.callback(place.module._parameters.__setitem__, place.attribute, use.parameter)
                place.module._parameters[place.attribute] = outside[use.name]
                undo.callback(_TAKEN.discard, place.module)
                _TAKEN.add(place.module)
        shards.append(Shard(group, layouts, residency, outside))
    return tuple(shards)


def free_values(shards: Sequence[Shard]) -> None:
    """Let the user's own parameters that absent ones stand for lose their values: the tiers have them."""
    for shard in shards:
        if shard.residency is not Residency.RESIDENT:
            for use in shard.group.uses:
                use.parameter.data = use.parameter.data.new_empty(0)


def _resident_parameters(
    group: ParameterGroup, layouts: UnitLayouts, slot: Slot, undo: ExitStack
) -> dict[str, nn.Parameter]:
    """Return the user's own parameters over the kept weights; new ones for those on the meta device."""
    views = Shard(group, layouts, Residency.RESIDENT, {}).views(slot.device)
    found = {}
    for use in group.uses:
        if use.parameter.is_meta:
            own = views[use.name].data  # with a version of its own
            found[use.name] = nn.Parameter(own, requires_grad=use.parameter.requires_grad)
        else:
            undo.callback(setattr, use.parameter, "data", use.parameter.data)
            use.parameter.data = views[use.name]
            found[use.name] = use.parameter
    return found


def _absent(spec: ParameterSpec, unit: str, device: torch.device) -> AbsentParameter:
    absent: AbsentParameter = AbsentParameter.standing_for(
        spec.name, unit, spec.shape, TORCH_DTYPES[spec.dtype], device, spec.trainable
    )
    return absent


def move_buffers(model: nn.Module, compute: ComputeDevice, ledger: Ledger, resources: ExitStack, undo: ExitStack) -> None:
    """Let every buffer of the model live where it computes; one that several modules hold stays one.

    `resources` gives the booking back, `undo` the buffers. Raises OverBudget.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by identity of the first, which must live as long
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                _book_buffer(buffer.numel() * buffer.element_size(), compute, ledger, resources)
                moved[id(buffer)] = (buffer, buffer.to(compute.torch_device))
            undo.callback(module._buffers.__setitem__, name, buffer)
            module._buffers[name] = moved[id(buffer)][1]


def _book_buffer(num_bytes: int, compute: ComputeDevice, ledger: Ledger, resources: ExitStack) -> None:
    if compute.memory is not None:
        ledger.take(Tier.GPU, Owner.ROOT.value, num_bytes)
        resources.callback(ledger.give, Tier.GPU, Owner.ROOT.value, num_bytes)


def refuse_loading(model: nn.Module) -> Callable[[], None]:
    """Let `load_state_dict` on any part of the model be an error, until the returned function is called.

    Loaded into a resident bf16 weight, values would meet the low halves of the old master.
    """
    hooks = [
        module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        for module in model.modules()
    ]

    def allow() -> None:
        for hook in hooks:
            hook.remove()

    return allow


def _refuse(module: nn.Module, *_: object) -> None:
    raise IllegalTransition(
        f"load_state_dict was called on {type(module).__name__} after the engine took over its weights.",
        remedy="Call it before infinity.initialize, or use engine.load_checkpoint.",
    )
