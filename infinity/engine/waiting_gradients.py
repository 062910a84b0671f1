"""Final gradients on their way from backward to the update: rounded, measured, and kept in RAM or spilled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import InfinityError
from infinity.handles import Handle, Ready
from infinity.memory.pool import BufferPool, Lease
from infinity.memory.transfer import Transfers
from infinity.optim.grad_norm import shard_sum_of_squares
from infinity.optim.kernel import AdamKernel
from infinity.store.layout import ShardLayout
from infinity.store.store import Store
from infinity.zero.shard import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """What is known of a step's gradients before the update."""

    sums_of_squares: tuple[float, ...]  # by shard; 0 where no parameter was touched
    touched: dict[int, frozenset[str]]  # by shard


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A gradient on its way from the compute device to host memory."""

    shard: int
    touched: frozenset[str]
    arrived: Handle[None]


class WaitingGradients:
    """Where the sums of zero put final gradients. One thread; the buffers are the store's or a slot's.

    On a device with memory of its own one buffer is filled there; while the next unit's backward runs, it is copied to the
    host, and before it is filled again the copy is measured.
    """

    def __init__(
        self,
        *,
        store: Store,
        layouts: Sequence[ShardLayout],
        slots: BufferPool | None,
        kernel: AdamKernel,
        grad_dtype: str,
        update_now: Callable[[Sequence[int]], None],
        transfers: Transfers,
        on_device: torch.Tensor | None,
    ) -> None:
        self._store = store
        self._layouts = layouts
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
        self._writes: list[Handle[None]] = []

    def flat(self, shard: int) -> torch.Tensor:
        """Return the tensor to fill: on the compute device, which is the waiting place itself where the CPU computes."""
        self._update_now([shard])  # the last step's gradient may still be needed where its unit was not called since
        self._settle()
        return self._filled(shard)

    def publish(self, shard: int, touched: frozenset[str]) -> None:
        """Let the filled gradient go to where it waits."""
        self._leaving = _Leaving(shard, touched, self._transfers.to_host(self._filled(shard), self._host(shard)))
        if self._leaving.arrived.done():
            self._settle()

    def host(self, shard: int, lease: Lease | None) -> torch.Tensor:
        """Return the tensor to fill in host memory; a spilled gradient leaves through the given lease of a slot."""
        self._settle()
        if lease is not None:
            self._leases[shard] = lease
        return self._host(shard)

    def publish_host(self, shard: int, touched: frozenset[str]) -> None:
        """Measure the gradient that was filled in host memory, and let it wait, or write it out."""
        self._leaving = _Leaving(shard, touched, Ready(None))
        self._settle()

    def _settle(self) -> None:
        """Measure the gradient that is leaving when it is there, and let it wait, or write it out."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        leaving.arrived.wait()
        shard, address = leaving.shard, self._host(leaving.shard).data_ptr()
        num_elements = self._layouts[shard].num_state_elements
        self._sums_of_squares[shard] = shard_sum_of_squares(self._kernel, address, num_elements, self._grad_dtype)
        self._touched[shard] = leaving.touched
        lease = self._leases.pop(shard, None)
        if lease is not None:
            try:
                write = self._store.publish_gradients(shard, lease.buffer)
            except InfinityError:  # not even begun: nobody else would give the slot back
                lease.release()
                raise
            lease.release_after(write)
            self._writes.append(write)

    def take_facts(self) -> GradientFacts:
        """Wait until every gradient is in its place; return what is known of them and begin anew."""
        self._settle()
        for write in self._writes:
            write.wait()
        facts = GradientFacts(tuple(self._sums_of_squares), self._touched)
        self._writes.clear()
        self._sums_of_squares = [0.0] * len(self._layouts)
        self._touched = {}
        return facts

    def discard(self) -> None:
        """Forget the gradients of a step that failed."""
        self.take_facts()
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    def _filled(self, shard: int) -> torch.Tensor:
        if self._on_device is None:
            return self._host(shard)
        dtype, num_elements = TORCH_DTYPES[self._grad_dtype], self._layouts[shard].num_state_elements
        return self._on_device[: num_elements * dtype.itemsize].view(dtype)

    def _host(self, shard: int) -> torch.Tensor:
        buffer = self._store.gradients(shard)
        if buffer is None:
            if shard not in self._leases:
                if self._slots is None:
                    raise KeyError(shard)
                self._leases[shard] = self._slots.lease()
            buffer = self._leases[shard].buffer
        return buffer.tensor(TORCH_DTYPES[self._grad_dtype], self._layouts[shard].num_state_elements)
