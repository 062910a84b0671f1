"""One call of a unit as one node of the autograd graph: forward keeps the inputs only, backward runs the unit again.

`rerun_call` is for units whose weights are absent: the first run makes no lasting graph, backward gathers the weights again,
reruns the unit and backpropagates through it. `straight_call` is ordinary autograd, for units whose weights stay.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from infinity.errors import ModelError
from infinity.zero.ambient import Autocast, autocasts
from infinity.zero.attributes import OwnAttributes
from infinity.zero.binding import Binding, installed, make_leaves
from infinity.zero.buffers import BufferValue, buffer_values, changed, put_back
from infinity.zero.gradients import GradientSums
from infinity.zero.guards import (
    require_closed_graph,
    require_dropped_graph,
    require_same_containers,
    sequence_mark,
    unchanged,
)
from infinity.zero.late_weights import LateWeights
from infinity.zero.micro_batch import START, MicroBatch, TrackedLeaf, Visit
from infinity.zero.randomness import Randomness
from infinity.zero.structure import Structure, take_apart
from infinity.zero.units import Unit

ShardWeights = Mapping[int, Mapping[str, torch.Tensor]]


class WeightSource(Protocol):
    """Gives a shard's parameters on the compute device."""

    def acquire(self, shard: int) -> Mapping[str, torch.Tensor]: ...

    def release(self, shard: int) -> None: ...


@dataclass(frozen=True, slots=True)
class UnitRuntime:
    """A unit with all that a call of it needs."""

    unit: Unit
    forward: Callable[..., Any]  # the module's own
    bindings: tuple[Binding, ...]
    weights: WeightSource
    sums: GradientSums
    randomness: Randomness
    device_types: tuple[str, ...]
    check: bool  # compare the bits of the rerun's outputs with the first run's
    measure: Callable[[], None]  # called while the activations of a call are alive

    @contextmanager
    def gathered(self) -> Iterator[ShardWeights]:
        """Hold the unit's weights for the time of the block."""
        held: dict[int, Mapping[str, torch.Tensor]] = {}
        try:
            for shard in self.unit.groups:
                held[shard] = self.weights.acquire(shard)
            yield held
        finally:
            for shard in held:
                self.weights.release(shard)


@dataclass(frozen=True, slots=True)
class _OutputFacts:
    shape: torch.Size
    dtype: torch.dtype
    digest: bytes  # empty unless checked


@dataclass(slots=True)
class _RerunCall:
    """What the backward of one call must know about its first run."""

    runtime: UnitRuntime
    micro_batch: MicroBatch
    visit: Visit
    position: int
    arguments: Structure
    autocasts: tuple[Autocast, ...]
    own_attributes: OwnAttributes
    attributes: tuple[object, ...]
    earlier_buffers: tuple[BufferValue, ...] = ()
    outputs: tuple[_OutputFacts, ...] = ()
    result: Structure | None = None  # until the caller has it

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[Structure, list[torch.Tensor]]:
        """Run the unit's own forward; return its result taken apart."""
        args, kwargs = filled = self.arguments.fill(inputs)
        self.runtime.randomness.at(self.micro_batch.global_index, self.position)
        with _autocast(self.autocasts):
            result = take_apart(self.runtime.forward(*args, **kwargs))
        require_same_containers(self.runtime.unit, self.arguments, inputs, filled)
        return result


def rerun_call(
    runtime: UnitRuntime, micro_batch: MicroBatch, arguments: Structure, tensors: Sequence[torch.Tensor],
    anchor: torch.Tensor, own_attributes: OwnAttributes,
) -> Any:  # fmt: skip
    """Call a unit as one autograd node. `anchor` requires grad where the unit has weights to train.

    So a unit without differentiable inputs, an embedding, has a backward.
    """
    call = _RerunCall(
        runtime, micro_batch, micro_batch.visits[-1], micro_batch.position, arguments, autocasts(runtime.device_types),
        own_attributes, own_attributes.values(),
    )  # fmt: skip
    outputs = _UnitNode.apply(anchor, call, *tensors)  # type: ignore[no-untyped-call]
    runtime.sums.expect(runtime.unit.groups)
    result, call.result = call.result, None
    return result.fill(outputs) if result is not None else None


class _UnitNode(torch.autograd.Function):
    """The node. Its inputs are the anchor and every tensor among the unit's arguments."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: _RerunCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, differentiable = _first_run(call, tensors)
        ctx.call, ctx.micro_batch = call, call.micro_batch
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, wanted in zip(outputs, differentiable, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *_rerun_and_backward(ctx.call, ctx.saved_tensors, gradients)


def _first_run(call: _RerunCall, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
    """Run the unit as the rerun will, and keep nothing but its detached outputs. See [Note: side channels]."""
    runtime, unit = call.runtime, call.runtime.unit
    buffers = buffer_values(unit.module)
    with torch.enable_grad(), runtime.gathered() as weights:
        mark = sequence_mark()
        inputs = _as_leaves(tensors)
        leaves = make_leaves(runtime.bindings, weights, call.visit, with_grad=True)
        own = [*inputs, *(leaf.tensor for leaf in leaves)]
        with installed(runtime.bindings, leaves), unchanged(unit, inputs, own[len(inputs) :]):
            call.result, found = call.run(inputs)
        require_closed_graph(unit, found, own, mark)
        differentiable = [output.requires_grad for output in found]
        outputs = [output.detach() for output in found]
        watched = [weakref.ref(tensor) for tensor in own if tensor.requires_grad]
        del found, inputs, leaves, own
        require_dropped_graph(unit, watched, call.arguments)
    call.earlier_buffers = changed(buffers)
    call.outputs = tuple(_facts(output, runtime.check) for output in outputs)
    return outputs, differentiable


def _rerun_and_backward(
    call: _RerunCall, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Run the unit again and backpropagate through it; return the gradients of its inputs.

    Its weights are in their places until the end: torch.utils.checkpoint inside the unit runs parts of it once more.
    """
    runtime = call.runtime
    if call.micro_batch.walking:
        raise ModelError(
            f"A gradient was asked for through unit {runtime.unit.name!r} while the forward pass was still running.",
            remedy="Keep the weights of the unit on the compute device and infinity.recompute off.",
        )
    with (
        torch.enable_grad(),
        runtime.gathered() as weights,
        put_back(call.earlier_buffers),
        call.own_attributes.put_back(call.attributes),
        runtime.randomness.borrowed(),
    ):
        inputs = _as_leaves(tensors)
        leaves = make_leaves(runtime.bindings, weights, call.visit, with_grad=True)
        with installed(runtime.bindings, leaves):
            _, outputs = call.run(inputs)
            runtime.measure()
            _require_same_outputs(call, outputs)
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        del outputs, pairs
    for leaf in leaves:
        if leaf.tensor.grad is not None:
            runtime.sums.add(leaf.shard, leaf.parameter, leaf.visit, leaf.tensor.grad)
    if not graph_is_kept():
        runtime.sums.complete(runtime.unit.groups)
    return tuple(tensor.grad for tensor in inputs)


def straight_call(
    runtime: UnitRuntime, micro_batch: MicroBatch, arguments: Structure, tensors: Sequence[torch.Tensor], late: LateWeights
) -> Any:
    """Call a unit under ordinary autograd. The caller keeps the weights in place until its backward has run."""
    args, kwargs = filled = arguments.fill(tensors)
    with runtime.gathered() as weights:
        leaves = make_leaves(runtime.bindings, weights, micro_batch.visits[-1], with_grad=True)
        track(leaves, runtime.sums, micro_batch)
        runtime.randomness.at(micro_batch.global_index, micro_batch.position)
        with (
            installed(runtime.bindings, leaves),
            _autocast(autocasts(runtime.device_types)),
            unchanged(runtime.unit, tensors, [leaf.tensor for leaf in leaves]),
        ):
            result = runtime.forward(*args, **kwargs)
    late.watch(runtime.bindings, leaves, tensors, result)
    require_same_containers(runtime.unit, arguments, tensors, filled)
    runtime.measure()
    if not micro_batch.straight:
        runtime.sums.expect(runtime.unit.groups)
        _complete_with(tensors, micro_batch, lambda: runtime.sums.complete(runtime.unit.groups))
    return result


def plain_call(
    runtime: UnitRuntime, randomness_at: tuple[int, int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a unit without any gradient of its own: evaluation, or a frozen unit whose inputs need none."""
    with runtime.gathered() as weights:
        leaves = make_leaves(runtime.bindings, weights, START, with_grad=False)
        if randomness_at is not None:
            runtime.randomness.at(*randomness_at)
        with (
            installed(runtime.bindings, leaves),
            _autocast(autocasts(runtime.device_types)),
            unchanged(runtime.unit, (), [leaf.tensor for leaf in leaves]),
        ):
            return runtime.forward(*args, **kwargs)


def track(leaves: Sequence[TrackedLeaf], sums: GradientSums, micro_batch: MicroBatch) -> None:
    """Send the gradient of each leaf to the sums as soon as autograd has it."""
    for leaf in leaves:
        if leaf.tensor.requires_grad:
            leaf.tensor.micro_batch = micro_batch  # type: ignore[attr-defined]
            leaf.tensor.register_post_accumulate_grad_hook(_collector(leaf, sums))  # type: ignore[no-untyped-call]
            micro_batch.leaves.append(leaf)


def _collector(leaf: TrackedLeaf, sums: GradientSums) -> Callable[[torch.Tensor], None]:
    shard, parameter, visit = leaf.shard, leaf.parameter, leaf.visit  # not the leaf: the hook belongs to its tensor

    def collect(tensor: torch.Tensor) -> None:
        if tensor.grad is not None:
            sums.add(shard, parameter, visit, tensor.grad)
            tensor.grad = None

    return collect


def graph_is_kept() -> bool:
    """Return whether the backward that runs keeps its graph (`retain_graph`), so that another one may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _as_leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _complete_with(tensors: Sequence[torch.Tensor], micro_batch: MicroBatch, complete: Callable[[], None]) -> None:
    """Call `complete` once, when autograd comes to the node that made the first of these inputs of a unit.

    Autograd executes nodes in descending order of creation, so every node inside the unit has run by then.
    """
    pending = [complete]

    def once(_: Sequence[torch.Tensor]) -> None:
        if pending and not micro_batch.walking and not graph_is_kept():  # forward itself may have asked for a gradient
            pending.pop()()

    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(once)


@contextmanager
def _autocast(states: Sequence[Autocast]) -> Iterator[None]:
    """Give the unit its caller's autocast state, without the cache of casts: it would keep the graph of the first run."""
    before = autocasts(tuple(state.device_type for state in states))
    if not any(state.enabled for state in (*states, *before)):
        yield
        return
    cache = torch.is_autocast_cache_enabled()
    _set_autocast(states, False)
    try:
        yield
    finally:
        _set_autocast(before, cache)


def _set_autocast(states: Sequence[Autocast], cache_enabled: bool) -> None:
    for state in states:
        torch.set_autocast_enabled(state.device_type, state.enabled)
        torch.set_autocast_dtype(state.device_type, state.dtype)
    torch.set_autocast_cache_enabled(cache_enabled)


def _facts(output: torch.Tensor, check: bool) -> _OutputFacts:
    return _OutputFacts(output.shape, output.dtype, _digest(output) if check else b"")


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).digest()


def _require_same_outputs(call: _RerunCall, outputs: Sequence[torch.Tensor]) -> None:
    expected = call.outputs
    got = tuple(_facts(output, call.runtime.check) for output in outputs)
    if expected == got:
        return
    number = next((number for number, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other), len(got))
    same_kind = [(facts.shape, facts.dtype) for facts in expected] == [(facts.shape, facts.dtype) for facts in got]
    what = "other bits" if same_kind else "another shape or dtype"
    raise ModelError(
        f"Unit {call.runtime.unit.name!r} gave {what} when it was run again for backward (output {number}).",
        remedy="Its forward must depend on its arguments, weights, buffers and torch's random numbers only.",
    )
