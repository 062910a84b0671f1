"""Final gradients on their way from backward to the update: rounded and measured in one pass, kept in RAM or spilled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.engine.spread import GradientSpread
from infinity.errors import IllegalTransition, InfinityError
from infinity.handles import Handle
from infinity.memory.pool import BufferPool, Lease
from infinity.memory.transfer import Transfers
from infinity.optim.grad_norm import combine_partials
from infinity.optim.kernel import AdamKernel, GradientRun, SquareSums
from infinity.store.extents import gradient_window
from infinity.store.layout import ShardLayout
from infinity.store.store import Store
from infinity.store.unit_size import UnitLayouts
from infinity.zero.gradients import FinalRun, fill
from infinity.zero.shard import TORCH_DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Elements that are looked at at a time: torch makes as many more on the way.
_EXAMINED_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """What is known of a step's gradients before the update."""

    sums_of_squares: tuple[float, ...]  # by shard; 0 where no parameter was touched
    touched: dict[int, frozenset[str]]  # by shard
    first_not_finite: str | None  # the parameter, in the order in which backward finished them


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A gradient on its way from the compute device to host memory."""

    shard: int
    touched: frozenset[str]
    arrived: Handle[None]


class WaitingGradients:
    """Where final gradients go: zero's GradientTarget on one rank, its PartTarget on several.

    One thread; the buffers are the store's or a slot's. What is rounded and measured is this rank's part; in stage 0 the
    whole is put together from all ranks' then.

    On a device with memory of its own one buffer is filled there; while the next unit's backward runs, it is copied to the
    host, and before it is filled again the copy is measured.
    """

    def __init__(
        self,
        *,
        store: Store,
        layouts: Sequence[UnitLayouts],
        spread: GradientSpread | None,
        slots: BufferPool | None,
        kernel: AdamKernel,
        grad_dtype: str,
        update_now: Callable[[Sequence[int]], None],
        transfers: Transfers,
        on_device: torch.Tensor | None,
    ) -> None:
        self._store = store
        self._layouts = tuple(one.owned for one in layouts)
        self._parts = tuple(one.part for one in layouts)
        self._spread = spread  # where several ranks own the whole
        self._slots = slots  # for spilled gradients on their way out
        self._kernel = kernel
        self._grad_dtype = grad_dtype
        self._update_now = update_now
        self._transfers = transfers
        self._on_device = on_device  # uint8, for the largest shard; None where the host's memory is the device's
        self._leaving: _Leaving | None = None
        self._leases: dict[int, Lease] = {}
        self._sums_of_squares = [0.0] * len(layouts)
        self._touched: dict[int, frozenset[str]] = {}
        self._first_not_finite: str | None = None
        self._writes: list[Handle[None]] = []

    @property
    def sums_micro_batches(self) -> bool:
        """False: see GradientTarget."""
        return False

    def begin_micro_batches(self) -> None:
        """Nothing: sums that wait for other micro-batches are zero's."""

    def settle(self) -> None:
        """Nothing: what was published is in its place, or on its way from the device's one buffer."""

    def finish(self) -> None:
        """Nothing: `take_facts` waits."""

    def publish(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """Let the final gradient go to where it waits; see GradientTarget."""
        self._update_now([shard])  # the last step's gradient may still be needed where its unit was not called since
        self._settle()
        if self._on_device is None:
            self._round(shard, runs, touched)
            return
        dtype, num_elements = TORCH_DTYPES[self._grad_dtype], self._layouts[shard].num_state_elements
        filled = self._on_device[: num_elements * dtype.itemsize].view(dtype)
        if self._spread is None:
            fill(filled, runs)
        else:
            fill(self._spread.part(shard), runs)
            self._spread.send(shard, filled).wait()
        self._leaving = _Leaving(shard, touched, self._transfers.to_host(filled, self._host(shard)))
        if self._leaving.arrived.done():
            self._settle()

    def publish_sum(self, shard: int, total: torch.Tensor, touched: frozenset[str], lease: Lease | None) -> None:
        """Round a total of host memory, fp32 [this rank's part], to the gradient that waits; they may begin at one place.

        A spilled gradient leaves through the given lease of a slot.
        """
        self._settle()
        if lease is not None:
            self._leases[shard] = lease
        self._round(shard, (FinalRun(0, total),), touched)

    def _round(self, shard: int, runs: Sequence[FinalRun], touched: frozenset[str]) -> None:
        """Round and measure a gradient of host memory in one pass."""
        native = [
            GradientRun(run.start, run.values.numel(), run.values.data_ptr(), _DTYPE_NAMES[run.values.dtype]) for run in runs
        ]
        rounded = self._host(shard) if self._spread is None else self._spread.part(shard)
        sums = self._kernel.round_gradient(native, rounded.data_ptr(), rounded.numel(), self._grad_dtype)
        self._note(shard, rounded, sums)
        if self._spread is not None:
            spread = self._spread.send(shard, self._host(shard))
            if shard in self._leases:  # it is written out as a whole
                spread.wait()
            else:
                self._writes.append(spread)
        self._wait_or_leave(shard, touched)

    def _settle(self) -> None:
        """Measure the gradient that comes from the device when it is there."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        leaving.arrived.wait()
        self._measure(leaving.shard)
        self._wait_or_leave(leaving.shard, leaving.touched)

    def _measure(self, shard: int) -> None:
        """Measure this rank's part of a gradient that is in its place."""
        whole = self._host(shard)
        part = whole if self._spread is None else self._spread.collect(shard, whole)
        self._note(shard, part, self._kernel.gradient_statistics(part.data_ptr(), part.numel(), self._grad_dtype))

    def _note(self, shard: int, part: torch.Tensor, sums: SquareSums) -> None:
        sum_of_squares = combine_partials(sums.partials)
        if not math.isfinite(sum_of_squares) and self._first_not_finite is None:
            self._first_not_finite = _first_not_finite(self._parts[shard], part)
        self._sums_of_squares[shard] = sum_of_squares

    def _wait_or_leave(self, shard: int, touched: frozenset[str]) -> None:
        """Let the gradient wait where it is, or write it out."""
        self._touched[shard] = touched
        lease = self._leases.pop(shard, None)
        if lease is not None:
            try:
                write = self._store.publish_gradients(shard, lease.buffer)
            except InfinityError:  # not even begun: nobody else would give the slot back
                lease.release()
                raise
            lease.release_after(write)
            self._writes.append(write)

    @property
    def touched(self) -> dict[int, frozenset[str]]:
        """By shard, the parameters whose gradient waits."""
        return dict(self._touched)

    def share_touched(self, touched: Mapping[int, frozenset[str]]) -> None:
        """Let parameters count as touched that other ranks have touched."""
        self._touched.update(touched)

    def _arrive(self) -> None:
        """Wait until every gradient is in its place."""
        self._settle()
        for write in self._writes:
            write.wait()
        self._writes.clear()

    def take_facts(self) -> GradientFacts:
        """Wait until every gradient is in its place; return what is known of them and begin anew."""
        self._arrive()
        facts = GradientFacts(tuple(self._sums_of_squares), self._touched, self._first_not_finite)
        self._sums_of_squares = [0.0] * len(self._layouts)
        self._touched = {}
        self._first_not_finite = None
        return facts

    def read(self, shard: int, parameter: str) -> torch.Tensor | None:
        """Return a copy of this rank's part of a finished gradient, 1-D of grad_dtype; None where this step has none."""
        self._arrive()
        if parameter not in self._touched.get(shard, ()):
            return None
        lease = self._fetch_spilled(shard)
        try:
            flat = self._host(shard)
            return torch.cat([flat[:0], *(flat[run] for run in _state_runs(self._layouts[shard], parameter))])
        finally:
            if lease is not None:
                self._leases.pop(shard).release()

    def write(self, shard: int, parameter: str, values: torch.Tensor) -> None:
        """Replace what `read` returns, rounded to grad_dtype, and measure the shard's gradient anew.

        Raises IllegalTransition for a parameter without a gradient in this step.
        """
        self._arrive()
        touched = self._touched.get(shard, frozenset())
        if parameter not in touched:
            raise IllegalTransition(
                f"Parameter {parameter} has no gradient in this step: none can be set.",
                remedy="Set gradients of parameters that backward reached.",
            )
        self._fetch_spilled(shard)
        flat, position = self._host(shard), 0
        for run in _state_runs(self._layouts[shard], parameter):
            flat[run] = values[position : position + run.stop - run.start]
            position += run.stop - run.start
        self._sums_of_squares[shard] = 0.0
        if all(math.isfinite(total) for total in self._sums_of_squares):
            self._first_not_finite = None  # what was not finite has been replaced
        self._measure(shard)
        self._wait_or_leave(shard, touched)

    def _fetch_spilled(self, shard: int) -> Lease | None:
        """Bring a spilled gradient back into a slot, where `_host` finds it; the slot, or nothing where it is resident."""
        if self._store.gradients(shard) is not None or self._slots is None:
            return None
        lease = self._slots.lease()
        try:
            for tile in self._layouts[shard].tiles:
                window = gradient_window(tile, TORCH_DTYPES[self._grad_dtype].itemsize)
                self._store.fetch_gradients(tile, lease.buffer.part(window.offset, window.num_bytes)).wait()
        except InfinityError:
            lease.release()
            raise
        self._leases[shard] = lease
        return lease

    def discard(self) -> None:
        """Forget the gradients of a step that failed."""
        self.take_facts()
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    def _host(self, shard: int) -> torch.Tensor:
        buffer = self._store.gradients(shard)
        if buffer is None:
            if shard not in self._leases:
                if self._slots is None:
                    raise IllegalTransition(
                        f"The gradient of {self._layouts[shard].name} is spilled, but there are no gradient slots."
                    )
                self._leases[shard] = self._slots.lease()
            buffer = self._leases[shard].buffer
        return buffer.tensor(TORCH_DTYPES[self._grad_dtype], self._layouts[shard].num_state_elements)


def _state_runs(layout: ShardLayout, parameter: str) -> list[slice]:
    """Return where the parameter's elements are in the shard's gradient, ascending."""
    return [
        slice(section.state_offset + segment.offset, section.state_offset + segment.offset + segment.length)
        for section in layout.sections
        for segment in (section.segments if section.trainable else ())
        if segment.parameter == parameter
    ]


def _first_not_finite(layout: ShardLayout, gradient: torch.Tensor) -> str | None:
    """Return the first parameter of the shard whose gradient has an element that is not finite."""
    for section in layout.sections:
        for segment in section.segments if section.trainable else ():
            start = section.state_offset + segment.offset
            end = start + segment.length
            for begin in range(start, end, _EXAMINED_AT_ONCE):
                if not gradient[begin : min(begin + _EXAMINED_AT_ONCE, end)].isfinite().all():
                    return segment.parameter
    return None
