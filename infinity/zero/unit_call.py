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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from infinity.errors import InputChangedError, ModelError
from infinity.zero.ambient import Autocast, autocasts
from infinity.zero.binding import Binding, installed, make_leaves
from infinity.zero.buffers import BufferValue, buffer_values, changed, put_back
from infinity.zero.gradients import GradientSums
from infinity.zero.guards import require_closed_graph, require_dropped_graph, require_unchanged, sequence_mark
from infinity.zero.micro_batch import MicroBatch, TrackedLeaf
from infinity.zero.randomness import Randomness
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
class Arguments:
    """The arguments of a call, with the tensors taken out."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # None where a tensor goes
    places: tuple[int, ...]  # of the tensors

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, self.spec)
        return args, kwargs


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[torch.Tensor]]:
    """Separate the tensors of a call's arguments from their structure."""
    leaves, spec = tree_flatten((args, kwargs))
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[place] for place in places]
    rest = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Arguments(spec, rest, places), tensors


@dataclass(frozen=True, slots=True)
class _OutputFacts:
    shape: torch.Size
    dtype: torch.dtype
    digest: bytes  # empty unless checked


@dataclass(slots=True)
class RerunCall:
    """What the backward of one call must know about its first run."""

    runtime: UnitRuntime
    micro_batch: MicroBatch
    position: int
    arguments: Arguments
    autocasts: tuple[Autocast, ...]
    earlier_buffers: tuple[BufferValue, ...] = ()
    outputs: tuple[_OutputFacts, ...] = ()
    rebuild: Callable[[Sequence[torch.Tensor]], Any] = lambda _: None

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
        """Run the unit's own forward; return its output tensors and how to build its result from such tensors."""
        args, kwargs = self.arguments.fill(tensors)
        self.runtime.randomness.at(self.micro_batch.global_index, self.position)
        with _autocast(self.autocasts):
            result = self.runtime.forward(*args, **kwargs)
        leaves, spec = tree_flatten(result)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        found = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None

        def rebuild(outputs: Sequence[torch.Tensor]) -> Any:
            for place, output in zip(places, outputs, strict=True):
                leaves[place] = output
            return tree_unflatten(leaves, spec)

        return found, rebuild


def rerun_call(
    runtime: UnitRuntime, micro_batch: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any], anchor: torch.Tensor
) -> Any:
    """Call a unit as one autograd node. `anchor` requires grad, so that a unit without differentiable inputs has a backward."""
    arguments, tensors = take_apart(args, kwargs)
    call = RerunCall(runtime, micro_batch, micro_batch.position, arguments, autocasts(runtime.device_types))
    outputs = _UnitNode.apply(anchor, call, *tensors)  # type: ignore[no-untyped-call]
    runtime.sums.expect(runtime.unit.groups)
    rebuild, call.rebuild = call.rebuild, lambda _: None
    return rebuild(outputs)


class _UnitNode(torch.autograd.Function):
    """The node. Its inputs are the anchor and every tensor among the unit's arguments."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: RerunCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        outputs, differentiable = _first_run(call, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, wanted in zip(outputs, differentiable, strict=True) if not wanted))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        return None, None, *_rerun_and_backward(ctx.call, ctx.saved_tensors, gradients)


def _first_run(call: RerunCall, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
    """Run the unit as the rerun will, and keep nothing but its detached outputs. See [Note: side channels]."""
    runtime, unit = call.runtime, call.runtime.unit
    buffers = buffer_values(unit.module)
    versions = [tensor._version for tensor in tensors]
    with torch.enable_grad(), runtime.gathered() as weights:
        mark = sequence_mark(torch.zeros((), requires_grad=True))
        inputs = _as_leaves(tensors)
        leaves = make_leaves(runtime.bindings, weights, call.position, with_grad=True)
        with installed(runtime.bindings, leaves), _naming_input_changes(unit):
            found, call.rebuild = call.run(inputs)
        require_unchanged(unit, tensors, versions)
        own = [*inputs, *(leaf.tensor for leaf in leaves)]
        require_closed_graph(unit, found, own, mark)
        differentiable = [output.requires_grad for output in found]
        outputs = [output.detach() for output in found]
        watched = [weakref.ref(tensor) for tensor in own if tensor.requires_grad]
        del found, inputs, leaves, own
        require_dropped_graph(unit, watched, call.arguments.leaves)
    call.earlier_buffers = changed(buffers)
    call.outputs = tuple(_facts(output, runtime.check) for output in outputs)
    return outputs, differentiable


def _rerun_and_backward(
    call: RerunCall, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    runtime = call.runtime
    with torch.enable_grad(), runtime.gathered() as weights, put_back(call.earlier_buffers):
        inputs = _as_leaves(tensors)
        leaves = make_leaves(runtime.bindings, weights, call.position, with_grad=True)
        with installed(runtime.bindings, leaves):
            outputs, _ = call.run(inputs)
        runtime.measure()
        _require_same_outputs(call, outputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        del outputs, pairs
    take_gradients(runtime.sums, leaves)
    runtime.sums.complete(runtime.unit.groups)
    return tuple(tensor.grad for tensor in inputs)


def straight_call(runtime: UnitRuntime, micro_batch: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit under ordinary autograd. The caller keeps the weights in place until its backward has run.

    The call is complete when the gradient of any of its inputs is: autograd executes nodes in descending order of creation,
    so every node inside the unit has run before the node that made the input.
    """
    _, tensors = take_apart(args, kwargs)
    versions = [tensor._version for tensor in tensors]
    with runtime.gathered() as weights:
        leaves = make_leaves(runtime.bindings, weights, micro_batch.position, with_grad=True)
        track(leaves, runtime.sums, micro_batch)
        runtime.randomness.at(micro_batch.global_index, micro_batch.position)
        with installed(runtime.bindings, leaves), _autocast(autocasts(runtime.device_types)), _naming_input_changes(runtime.unit):
            result = runtime.forward(*args, **kwargs)
    runtime.measure()
    require_unchanged(runtime.unit, tensors, versions)
    if not micro_batch.straight:
        runtime.sums.expect(runtime.unit.groups)
        _complete_with(tensors, lambda: runtime.sums.complete(runtime.unit.groups))
    return result


def plain_call(runtime: UnitRuntime, randomness_at: tuple[int, int] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit without any gradient of its own: evaluation, or a frozen unit whose inputs need none."""
    with runtime.gathered() as weights:
        leaves = make_leaves(runtime.bindings, weights, 0, with_grad=False)
        if randomness_at is not None:
            runtime.randomness.at(*randomness_at)
        with installed(runtime.bindings, leaves), _autocast(autocasts(runtime.device_types)):
            return runtime.forward(*args, **kwargs)


def track(leaves: Sequence[TrackedLeaf], sums: GradientSums, micro_batch: MicroBatch) -> None:
    """Send the gradient of each leaf to the sums as soon as autograd has it."""
    for leaf in leaves:
        if leaf.tensor.requires_grad:
            leaf.tensor.register_post_accumulate_grad_hook(_collector(leaf, sums, micro_batch))
    micro_batch.leaves.extend(leaf for leaf in leaves if leaf.tensor.requires_grad)


def _collector(leaf: TrackedLeaf, sums: GradientSums, micro_batch: MicroBatch) -> Callable[[torch.Tensor], None]:
    shard, parameter, position = leaf.shard, leaf.parameter, leaf.position  # not the leaf: the hook belongs to its tensor

    def collect(tensor: torch.Tensor) -> None:
        if tensor.grad is not None:
            sums.add(shard, parameter, position, tensor.grad)
            tensor.grad = None

    return collect


def take_gradients(sums: GradientSums, leaves: Sequence[TrackedLeaf]) -> None:
    """Move the gradients of leaves whose backward has ended into the sums."""
    for leaf in leaves:
        if leaf.tensor.grad is not None:
            sums.add(leaf.shard, leaf.parameter, leaf.position, leaf.tensor.grad)
            leaf.tensor.grad = None


def _as_leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _complete_with(tensors: Sequence[torch.Tensor], complete: Callable[[], None]) -> None:
    pending = [complete]

    def once(_: torch.Tensor) -> None:
        if pending:
            pending.pop()()

    for tensor in tensors:
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(once)  # type: ignore[no-untyped-call]


@contextmanager
def _autocast(states: Sequence[Autocast]) -> Iterator[None]:
    """Give the unit its caller's autocast state, without the cache of casts: it would keep the graph of the first run."""
    if not any(state.enabled for state in states) and not any(torch.is_autocast_enabled(state.device_type) for state in states):
        yield
        return
    before, cache = autocasts(tuple(state.device_type for state in states)), torch.is_autocast_cache_enabled()
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


@contextmanager
def _naming_input_changes(unit: Unit) -> Iterator[None]:
    """Turn torch's refusal to change a leaf in place into the error that names the unit."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise InputChangedError(
            f"Unit {unit.name!r} changes an input tensor or a weight in place: {error}",
            remedy="Let it work on a copy: the rerun in backward needs the input as it was.",
        ) from error


def _facts(output: torch.Tensor, check: bool) -> _OutputFacts:
    return _OutputFacts(output.shape, output.dtype, _digest(output) if check else b"")


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).digest()


def _require_same_outputs(call: RerunCall, outputs: Sequence[torch.Tensor]) -> None:
    expected = call.outputs
    got = tuple(_facts(output, call.runtime.check) for output in outputs)
    if expected == got:
        return
    differing = next((number for number, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), len(got))
    what = "other bits" if [(f.shape, f.dtype) for f in expected] == [(f.shape, f.dtype) for f in got] else "another shape or dtype"
    raise ModelError(
        f"Unit {call.runtime.unit.name!r} gave {what} when it was run again for backward (output {differing}).",
        remedy="Its forward must depend on its arguments, weights, buffers and torch's random numbers only.",
    )
