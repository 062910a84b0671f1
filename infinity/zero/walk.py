"""How a call of a unit is made: the one place that decides between a rerun node, ordinary autograd and a plain call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from infinity.errors import IllegalTransition
from infinity.zero.binding import Binding, install, make_leaves
from infinity.zero.gradients import GradientSums
from infinity.zero.guards import sequence_mark
from infinity.zero.micro_batch import LastCall, MicroBatch
from infinity.zero.randomness import Randomness
from infinity.zero.unit_call import UnitRuntime, WeightSource, plain_call, rerun_call, straight_call, take_apart, track


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
        self, module: nn.Module, units: Sequence[UnitRuntime], rerun: Sequence[bool], root: Sequence[Binding], weights: WeightSource,
        sums: GradientSums, randomness: Randomness,
    ) -> None:  # fmt: skip
        self.module = module
        self._units = tuple(units)
        self._rerun = tuple(rerun)  # by unit: whether its weights leave between forward and backward
        self._root = tuple(root)
        self._weights = weights
        self.sums = sums
        self._randomness = randomness
        self._arrivals: Arrivals = GoOn()
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

    def detach(self) -> None:
        """Give the modules their own forward back."""
        for runtime in self._units:
            runtime.unit.module.__dict__.pop("forward", None)

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
        self.micro_batch = micro_batch
        self._begin_segment(micro_batch)

    def end(self) -> None:
        """No micro-batch is walking; the root group's own parameters are back in their places."""
        self.micro_batch = None
        install(self._root, [binding.outside for binding in self._root])

    def _call(self, index: int, *args: Any, **kwargs: Any) -> Any:
        runtime = self._units[index]
        if self.micro_batch is None:
            if torch.is_grad_enabled() and runtime.unit.module.training:
                raise IllegalTransition(
                    f"Unit {runtime.unit.name!r} was called for training outside the engine.",
                    remedy="Call the engine (engine(...), engine.train_batch(...)) instead of the model, or use torch.no_grad().",
                )
            with torch.no_grad():
                return plain_call(runtime, None, args, kwargs)
        self._arrivals.arrive(index)
        micro_batch = self.micro_batch
        micro_batch.enter(index)
        try:
            return self._routed(index)(runtime, micro_batch, args, kwargs)
        finally:
            micro_batch.position += 1
            self._begin_segment(micro_batch)

    def _routed(self, index: int) -> Callable[..., Any]:
        if not torch.is_grad_enabled():
            return self._without_gradient
        return self._rerun_or_plain if self._rerun[index] else self._straight

    def _without_gradient(self, runtime: UnitRuntime, micro_batch: MicroBatch, args: Any, kwargs: Any) -> Any:
        return plain_call(runtime, (micro_batch.global_index, micro_batch.position), args, kwargs)

    def _straight(self, runtime: UnitRuntime, micro_batch: MicroBatch, args: Any, kwargs: Any) -> Any:
        self._note_last_call(micro_batch, args, kwargs)
        return straight_call(runtime, micro_batch, args, kwargs)

    def _rerun_or_plain(self, runtime: UnitRuntime, micro_batch: MicroBatch, args: Any, kwargs: Any) -> Any:
        if micro_batch.straight:
            return self._straight(runtime, micro_batch, args, kwargs)
        _, tensors = take_apart(args, kwargs)
        trainable = any(binding.trainable for binding in runtime.bindings)
        if not trainable and not any(tensor.requires_grad for tensor in tensors):
            return self._without_gradient(runtime, micro_batch, args, kwargs)  # no backward visit
        anchor = torch.zeros((), requires_grad=trainable)
        self._note_last_call(micro_batch, args, kwargs, anchor)
        return rerun_call(runtime, micro_batch, args, kwargs, anchor)

    def _note_last_call(self, micro_batch: MicroBatch, args: Any, kwargs: Any, anchor: torch.Tensor | None = None) -> None:
        if micro_batch.straight and micro_batch.last_call is not None:
            return  # the tail was cut off at its first call
        _, tensors = take_apart(args, kwargs)
        anchor = torch.zeros((), requires_grad=True) if anchor is None else anchor
        wanted = tuple(tensor for tensor in tensors if tensor.requires_grad)
        micro_batch.last_call = LastCall(wanted, anchor, sequence_mark(torch.zeros((), requires_grad=True)))
        micro_batch.leaves.clear()

    def _begin_segment(self, micro_batch: MicroBatch) -> None:
        """Between two units: the root group's parameters get leaves of their own, booked to this position."""
        self._randomness.at(micro_batch.global_index, micro_batch.position)
        if not self._root or not torch.is_grad_enabled():
            return
        shard = self._root[0].shard
        weights = {shard: self._weights.acquire(shard)}
        leaves = make_leaves(self._root, weights, micro_batch.position, with_grad=True)
        self._weights.release(shard)
        track(leaves, self.sums, micro_batch)
        install(self._root, [leaf.tensor for leaf in leaves])


