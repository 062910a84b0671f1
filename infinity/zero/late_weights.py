"""Weights of kept units during backward: torch.utils.checkpoint inside a unit runs parts of it again and looks them up.

Between calls the modules hold what the user sees, not the leaves of a call. So when backward comes to a call that ran under
ordinary autograd its leaves are put into their places, until it comes to the next such call or is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.zero.binding import Binding, install
from infinity.zero.micro_batch import TrackedLeaf
from infinity.zero.structure import take_apart


class LateWeights:
    """Which call's leaves are in their places. One for all units of a walk. Autograd calls it, one thread at a time."""

    def __init__(self) -> None:
        self._installed: Sequence[Binding] = ()

    def watch(
        self, bindings: Sequence[Binding], leaves: Sequence[TrackedLeaf], inputs: Sequence[torch.Tensor], result: Any
    ) -> None:
        """Put the leaves into their places when backward reaches the result of a call."""
        before = {tensor.grad_fn for tensor in inputs}
        nodes = {tensor.grad_fn for tensor in take_apart(result)[1]} - before - {None}
        tensors = [leaf.tensor for leaf in leaves]

        def enter(_: Sequence[torch.Tensor]) -> None:
            self.restore()
            self._installed = bindings
            install(bindings, tensors)
            torch.autograd.Variable._execution_engine.queue_callback(self.restore)

        for node in nodes:
            node.register_prehook(enter)  # type: ignore[union-attr]

    def restore(self) -> None:
        """Let the modules hold what they hold between calls."""
        installed, self._installed = self._installed, ()
        install(installed, [binding.outside for binding in installed])
