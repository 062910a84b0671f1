"""How a call of a unit is made: the one place that decides between a rerun node, ordinary autograd and a plain call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import IllegalTransition, ModelError
from infinity.zero.attributes import OwnAttributes
from infinity.zero.binding import Binding, install, make_leaves
from infinity.zero.gradients import GradientSums
from infinity.zero.late_weights import LateWeights
from infinity.zero.micro_batch import LastCall, MicroBatch
from infinity.zero.randomness import Randomness
from infinity.zero.structure import Structure, take_apart
from infinity.zero.unit_call import UnitRuntime, WeightSource, plain_call, rerun_call, straight_call, track


class Arrivals(Protocol):
    """What a schedule does when a micro-batch comes to a unit: go on at once, or let others come first."""

    def arrive(self, unit: int) -> None: ...


class GoOn:
    """The horizontal order: nobody waits for anybody."""

    def arrive(self, unit: int) -> None:
        return


class Walk:
    """Routes every call of every unit. Owner: the engine. One thread; between steps no micro-batch is walking."""

    def __init__(
        self, module: nn.Module, units: Sequence[UnitRuntime], rerun: Sequence[bool], root: Sequence[Binding],
        weights: WeightSource, sums: GradientSums, randomness: Randomness,
    ) -> None:  # fmt: skip
        self.module = module
        self._units = tuple(replace(runtime, forward=self._entered(runtime.forward)) for runtime in units)
        self._own_forwards = tuple(runtime.forward for runtime in units)
        self._rerun = tuple(rerun)  # by unit: whether its weights leave between forward and backward
        self._root = tuple(root)
        self._root_weights: dict[int, Mapping[str, torch.Tensor]] = {}  # while a micro-batch walks
        self._weights = weights
        self.sums = sums
        self._randomness = randomness
        self._arrivals: Arrivals = GoOn()
        self.own_attributes = OwnAttributes()
        self._inside_unit = False
        self._late = LateWeights()
        self._hooks: list[RemovableHandle] = []
        self.micro_batch: MicroBatch | None = None  # the one whose code is running

    @property
    def num_units(self) -> int:
        return len(self._units)

    def groups(self, unit: int) -> tuple[int, ...]:
        """Return the shards that a call of the unit needs."""
        return self._units[unit].unit.groups

    def attach(self) -> None:
        """Route the calls of the units' modules through the walk."""
        for index, runtime in enumerate(self._units):
            runtime.unit.module.forward = functools.wraps(runtime.forward)(functools.partial(self._call, index))
        self._hooks = list(self._watch_parameters())

    def detach(self) -> None:
        """Give the modules their own forward back."""
        for runtime, forward in zip(self._units, self._own_forwards, strict=True):
            module = runtime.unit.module
            del module.forward
            if module.forward != forward:  # somebody had replaced it before
                module.forward = forward
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def ordered_by(self, arrivals: Arrivals) -> Iterator[None]:
        """Let a schedule decide who goes first, for the time of the block."""
        before, self._arrivals = self._arrivals, arrivals
        try:
            yield
        finally:
            self._arrivals = before

    def begin(self, micro_batch: MicroBatch) -> None:
        """The code that runs from now on is this micro-batch's, from before its first unit."""
        for shard in {binding.shard for binding in self._root}:
            self._root_weights[shard] = self._weights.acquire(shard)
            self._weights.release(shard)
        micro_batch.walking = True
        self.micro_batch = micro_batch
        self._begin_stretch(micro_batch)

    def end(self) -> None:
        """No micro-batch is walking; the modules hold what they hold between calls, also where a backward has failed."""
        self._late.restore()
        if self.micro_batch is not None:
            self.micro_batch.forget()
        self.micro_batch = None
        self._root_weights.clear()
        install(self._root, [binding.outside for binding in self._root])

    def _call(self, index: int, *args: Any, **kwargs: Any) -> Any:
        runtime, micro_batch = self._units[index], self.micro_batch
        if self._inside_unit:  # a unit that is a part of another one: the outer call has its weights
            return runtime.forward(*args, **kwargs)
        if micro_batch is None:
            return self._outside_steps(runtime, args, kwargs)
        arguments, tensors = take_apart((args, kwargs))
        inputs = _aliased(tensors)
        self._arrivals.arrive(index)
        micro_batch.enter(index)
        try:
            trainable = any(binding.trainable for binding in runtime.bindings)
            if torch.is_grad_enabled() and (trainable or any(tensor.requires_grad for tensor in inputs)):
                return self._with_backward(index, micro_batch, arguments, inputs, trainable)
            return plain_call(runtime, (micro_batch.global_index, micro_batch.position), args, kwargs)
        finally:
            micro_batch.position += 1
            self._begin_stretch(micro_batch)

    def _outside_steps(self, runtime: UnitRuntime, args: Any, kwargs: Any) -> Any:
        """Evaluate the unit. Raises where a gradient may be expected."""
        if torch._C._current_graph_task_id() != -1:
            raise ModelError(
                f"Unit {runtime.unit.name!r} was called while backward was running.",
                remedy="Turn gradient checkpointing (torch.utils.checkpoint) around units off: infinity reruns them itself.",
            )
        if torch.is_grad_enabled() and runtime.unit.module.training:
            raise IllegalTransition(
                f"Unit {runtime.unit.name!r} was called for training outside the engine.",
                remedy="Call the engine (engine(...), engine.train_batch(...)) and not the model, or use torch.no_grad().",
            )
        with torch.no_grad():
            return plain_call(runtime, None, args, kwargs)

    def _with_backward(
        self, index: int, micro_batch: MicroBatch, arguments: Structure, inputs: Sequence[torch.Tensor], trainable: bool
    ) -> Any:
        """Make a call that has a backward visit: as a rerun node, or under ordinary autograd."""
        runtime = self._units[index]
        first_of_tail = micro_batch.straight and micro_batch.last_call is None
        rerun = self._rerun[index] and not first_of_tail
        anchor = torch.zeros((), requires_grad=trainable) if rerun else None
        if micro_batch.learning or first_of_tail:
            wanted = tuple(tensor for tensor in inputs if tensor.requires_grad)
            micro_batch.last_call = LastCall(micro_batch.visits[-1], wanted, anchor)
            micro_batch.leaves.clear()
        if anchor is None:
            return straight_call(runtime, micro_batch, arguments, inputs, self._late)
        return rerun_call(runtime, micro_batch, arguments, inputs, anchor, self.own_attributes)

    def _begin_stretch(self, micro_batch: MicroBatch) -> None:
        """Between two units: the root group's parameters get leaves of their own, booked to this stretch."""
        self._randomness.at(micro_batch.global_index, micro_batch.position)
        if self._root:
            leaves = make_leaves(self._root, self._root_weights, micro_batch.stretch, with_grad=True)
            track(leaves, self.sums, micro_batch)
            install(self._root, [leaf.tensor for leaf in leaves])

    def _entered(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def entered(*args: Any, **kwargs: Any) -> Any:
            before, self._inside_unit = self._inside_unit, True
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside_unit = before

        return entered

    def _watch_parameters(self) -> Iterator[RemovableHandle]:
        """Let no gradient get lost in the resident parameters themselves: calls and stretches use leaves in their stead."""
        watched: set[int] = set()
        for binding in (*self._root, *(binding for runtime in self._units for binding in runtime.bindings)):
            outside = binding.outside
            if id(outside) not in watched and outside.requires_grad and outside.is_leaf and not binding.absent:
                watched.add(id(outside))
                yield outside.register_post_accumulate_grad_hook(_refuse(binding.parameter))  # type: ignore[no-untyped-call]


def _aliased(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same memory, with a node of their own where they require a gradient.

    The gradients of all uses of an input inside a unit so add up before they meet those from outside, whether the unit runs
    again in backward or not. Made before others go first, the nodes are older the later the micro-batch, like all others.
    """
    return [tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor for tensor in tensors]


def _refuse(parameter: str) -> Callable[[torch.Tensor], None]:
    def refuse(tensor: torch.Tensor) -> None:
        tensor.grad = None
        raise ModelError(
            f"Parameter {parameter} was used outside its unit, where its gradient would be lost.",
            remedy="Use it inside its unit's forward, or list in infinity.units the modules that are to be units, without "
            "the one that holds it: parameters of no unit may be used anywhere.",
        )

    return refuse
