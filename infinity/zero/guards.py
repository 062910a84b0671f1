"""What a unit must not do if its rerun is to be exact: leak a graph, take one in, or change its inputs.

[Note: side channels] The first run of a unit builds a graph only to use the kernels of the rerun, and drops it. Whoever
keeps a tensor of that graph (an attribute read later, a cache argument, a hook's list) would compute with it, and its
gradient would be lost without a word. The graph holds the unit's leaves, so a leaf that outlives the run betrays it. In the
other direction, autograd numbers its nodes in the order of creation: a node in the graph of the outputs that is older than
the run came in other than as an argument.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import Node

from infinity.errors import InputChangedError, ModelError, SideChannelError
from infinity.zero.attributes import holds
from infinity.zero.micro_batch import MicroBatch
from infinity.zero.structure import Structure, take_apart
from infinity.zero.units import Unit

_COPY_REMEDY = "Let it work on a copy: the rerun in backward needs everything as it was."


def sequence_mark() -> int:
    """Return a number that every autograd node made before has not reached, and every later one has."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def graph_nodes(roots: Iterable[torch.Tensor], stops: frozenset[Node | None] = frozenset()) -> Iterator[Node]:
    """Yield every node of the graph behind `roots` once, without looking at those in `stops` or behind them."""
    pending = [root.grad_fn for root in roots]
    seen: set[Node | None] = {None, *stops}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def variable_of(node: Node) -> torch.Tensor | None:
    """Return the leaf at which a path through the graph ends, if the node is such an end."""
    if not node.name().endswith("AccumulateGrad"):
        return None
    variable: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return variable


def require_closed_graph(unit: Unit, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor], mark: int) -> None:
    """Raise SideChannelError when the graph of a unit's outputs reaches anything but its arguments and its own weights.

    A leaf tensor that is no parameter may be used freely: the rerun gives it its gradient.
    """
    known = {id(tensor) for tensor in own}
    for node in graph_nodes(outputs):
        variable = variable_of(node)
        if variable is None and node._sequence_nr() < mark:
            raise SideChannelError(
                f"Unit {unit.name!r} uses a tensor with a gradient ({node.name()}) that is none of its arguments.",
                remedy="Pass it to the unit as an argument, so that its gradient can flow back.",
            )
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            raise SideChannelError(
                f"Unit {unit.name!r} uses a parameter of shape {tuple(variable.shape)} that belongs to no module inside it.",
                remedy="Register the parameter inside the unit, or name the module that holds both in infinity.units.",
            )


def require_dropped_graph(unit: Unit, watched: Sequence[weakref.ref[torch.Tensor]], arguments: Structure) -> None:
    """Raise SideChannelError when a leaf of the first run is still alive although everything we hold has been dropped."""
    if not any(reference() is not None for reference in watched):
        return
    gc.collect()  # a cycle may have kept it
    if not any(reference() is not None for reference in watched):
        return
    where = _holder(unit, arguments) or "something outside the unit (a hook, a list, a closure)"
    raise SideChannelError(
        f"Unit {unit.name!r} leaves a tensor with a gradient behind in {where}; its gradient would be lost.",
        remedy="Return the tensor from the unit, or detach it.",
    )


def require_same_containers(unit: Unit, arguments: Structure, tensors: Sequence[torch.Tensor], after: object) -> None:
    """Raise when a unit put something into, or took something out of, a list, dict or dataclass among its arguments.

    The unit saw copies of them, so that the change would be lost.
    """
    structure, found = take_apart(after)
    if arguments.same(structure) and len(found) == len(tensors) and all(map(_is, found, tensors)):
        return
    if any(tensor.requires_grad and not any(tensor is known for known in tensors) for tensor in found):
        raise SideChannelError(
            f"Unit {unit.name!r} leaves a tensor with a gradient behind in a list or dict among its arguments.",
            remedy="Return the tensor from the unit.",
        )
    raise InputChangedError(f"Unit {unit.name!r} changes a list or dict among its arguments in place.", remedy=_COPY_REMEDY)


@contextmanager
def unchanged(unit: Unit, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise InputChangedError when the block, a run of the unit, writes into an input or a weight."""
    watched = [(f"input tensor {number}", tensor) for number, tensor in enumerate(inputs)]
    watched += [("weight", tensor) for tensor in weights]
    before = [_version(tensor) for _, tensor in watched]
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise InputChangedError(
            f"Unit {unit.name!r} changes an input tensor or a weight in place: {error}", remedy=_COPY_REMEDY
        ) from error
    for (what, tensor), version in zip(watched, before, strict=True):
        if _version(tensor) != version:
            raise InputChangedError(
                f"Unit {unit.name!r} changes its {what} (shape {tuple(tensor.shape)}) in place.", remedy=_COPY_REMEDY
            )


def require_own_graph(roots: Iterable[torch.Tensor], micro_batch: MicroBatch) -> None:
    """Raise SideChannelError when what a micro-batch computed depends on what another one did in the same step."""
    for node in graph_nodes(roots):
        owner = getattr(node, "micro_batch", None) or getattr(variable_of(node), "micro_batch", None)
        if isinstance(owner, MicroBatch) and owner is not micro_batch:
            raise SideChannelError(
                f"The loss of micro-batch {micro_batch.index} depends on a tensor of micro-batch {owner.index}, "
                "which was kept in a list, cache or global between units.",
                remedy='Pass such tensors as arguments and results, or train with "infinity": {"schedule": "horizontal"}.',
            )


def require_some_gradient(found: bool) -> None:
    """Raise ModelError when no micro-batch's loss depends on anything that is trained."""
    if not found:
        raise ModelError(
            "No loss of this step requires a gradient.",
            remedy="Check that the model has trainable parameters and that the step does not run under torch.no_grad().",
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is(one: object, other: object) -> bool:
    return one is other


def _holder(unit: Unit, arguments: Structure) -> str | None:
    for name, module in unit.module.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_modules") and holds(value, _has_graph):
                return f"attribute {'.'.join(part for part in (unit.name, name, attribute) if part)!r}"
    for argument in arguments.leaves:
        if holds(argument, _has_graph):
            return f"an argument of type {type(argument).__name__}"
    return None


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)
