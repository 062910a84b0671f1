"""What a unit must not do if its rerun is to be exact: leak a graph, take one in, or change its inputs.

[Note: side channels] The first run of a unit builds a graph only to use the kernels of the rerun, and drops it. Whoever keeps
a tensor of that graph (an attribute read later, a cache argument, a hook's list) would compute with it, and its gradient would
be lost without a word. The graph holds the unit's leaves, so a leaf that outlives the run betrays it. In the other direction,
autograd numbers its nodes in the order of creation: a node in the graph of the outputs that is older than the run came in
other than as an argument.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from infinity.errors import InputChangedError, SideChannelError
from infinity.zero.units import Unit


def sequence_mark(anchor: torch.Tensor) -> int:
    """Return a number that every autograd node made before has not reached, and every later one has."""
    with torch.enable_grad():
        node = anchor.view(()).grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def older_node(roots: Iterable[torch.Tensor], mark: int, stops: frozenset[object] = frozenset()) -> str | None:
    """Walk the graph of `roots` and return the name of a node older than `mark`, not looking behind nodes in `stops`."""
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[object] = set()
    while pending:
        node = pending.pop()
        if node in seen or node in stops:
            continue
        seen.add(node)
        if not hasattr(node, "variable") and node._sequence_nr() < mark:
            return str(node.name())
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return None


def foreign_parameter(roots: Iterable[torch.Tensor], own: Sequence[torch.Tensor]) -> nn.Parameter | None:
    """Return a parameter that the graph of `roots` uses although it is none of the unit's own leaves."""
    known = {id(tensor) for tensor in own}
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[object] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            return variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return None


def require_closed_graph(unit: Unit, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor], mark: int) -> None:
    """Raise SideChannelError when the graph of a unit's outputs reaches anything but its arguments and its own weights."""
    older = older_node(outputs, mark)
    if older is not None:
        raise SideChannelError(
            f"Unit {unit.name!r} uses a tensor with a gradient ({older}) that is none of its arguments.",
            remedy="Pass it to the unit as an argument, so that its gradient can flow back.",
        )
    foreign = foreign_parameter(outputs, own)
    if foreign is not None:
        raise SideChannelError(
            f"Unit {unit.name!r} uses a parameter of shape {tuple(foreign.shape)} that belongs to no module inside it.",
            remedy="Register the parameter inside the unit, or name the module that holds both in infinity.units.",
        )


def require_dropped_graph(unit: Unit, watched: Sequence[weakref.ref[torch.Tensor]], arguments: Sequence[object]) -> None:
    """Raise SideChannelError when a leaf of the first run is still alive although everything we hold has been dropped."""
    if not any(reference() is not None for reference in watched):
        return
    gc.collect()  # a cycle may have kept it
    if not any(reference() is not None for reference in watched):
        return
    where = _holder(unit, arguments) or "something outside the unit (a hook, a list, a closure)"
    raise SideChannelError(
        f"Unit {unit.name!r} leaves a tensor with a gradient behind in {where}; its gradient would be lost.",
        remedy="Return the tensor from the unit, detach it, or keep the unit's parameters resident and recomputation off.",
    )


def require_unchanged(unit: Unit, inputs: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Raise InputChangedError when a unit wrote into one of its input tensors."""
    for position, (tensor, version) in enumerate(zip(inputs, versions, strict=True)):
        if tensor._version != version:
            raise InputChangedError(
                f"Unit {unit.name!r} changes its input tensor {position} (shape {tuple(tensor.shape)}) in place.",
                remedy="Let it work on a copy: the rerun in backward needs the input as it was.",
            )


def _holder(unit: Unit, arguments: Sequence[object]) -> str | None:
    for name, module in unit.module.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_modules") and _holds_graph(value, depth=3):
                return f"attribute {'.'.join(part for part in (unit.name, name, attribute) if part)!r}"
    for argument in arguments:
        if _holds_graph(argument, depth=4):
            return f"an argument of type {type(argument).__name__}"
    return None


def _holds_graph(value: object, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if depth == 0:
        return False
    return any(_holds_graph(part, depth - 1) for part in _parts(value))


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from vars(value).values()
