"""Who makes the updates: the stream of tiles with infinity's own Adam, or an optimizer of torch (`optim.torch_rule`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from infinity.engine.groups import Groups
from infinity.engine.optimizer import Optimizer
from infinity.memory.ledger import Ledger
from infinity.optim.hyper import UpdateStep
from infinity.optim.stream import UpdateStream
from infinity.optim.torch_rule import TorchRule, open_torch_rule
from infinity.store.store import Store
from infinity.zero.shard import Shard

# Begins the update of a step: for each shard, the touched parameters with their step counts; what multiplies gradients.
BeginUpdate = Callable[[Mapping[int, Mapping[str, int]], float], None]


class UpdateRule(Protocol):
    """Begins updates: what it returns from `fix` makes them now, or lets the next load of each touched shard bring them."""

    def fix(self) -> BeginUpdate:
        """Fix the hyper-parameters. Raises ConfigError for what is none; nothing is touched then."""
        ...


class AdamRule:
    """Adam or AdamW: every touched tile is due in the stream."""

    def __init__(self, stream: UpdateStream, optimizer: Optimizer, grad_dtype: str) -> None:
        self._stream = stream
        self._optimizer = optimizer
        self._grad_dtype = grad_dtype

    def fix(self) -> BeginUpdate:
        hyper = self._optimizer.hyper()
        return lambda steps, coefficient: self._stream.begin(UpdateStep(hyper, steps, coefficient, self._grad_dtype))


def open_torch_rule_of(
    groups: Groups, shards: Sequence[Shard], store: Store, grad_dtype: str, ledger: Ledger, settle: Callable[[], None],
    undo: ExitStack,
) -> TorchRule | None:  # fmt: skip
    """Return the rule of the optimizer of torch that the user wants; None where that is infinity's Adam.

    `undo` gives a given optimizer its own state back. The groups hold the module's parameters already. Raises ConfigError
    for state on the meta device.
    """
    wanted = groups.own_rule
    if wanted is None:
        return None
    if wanted.given is not None:
        undo.callback(setattr, wanted.given, "state", wanted.given.state)
    names = {id(shard.outside[spec.name]): spec.name for shard in shards for spec in shard.layout.specs}
    own = {use.name: use.parameter for shard in shards for use in shard.group.uses}
    return open_torch_rule(
        layouts=[shard.layout for shard in shards],
        names=[[names[id(parameter)] for parameter in group["params"]] for group in groups.values],
        store=store,
        grad_dtype=grad_dtype,
        make=lambda pieces: wanted.over(groups.values, own, pieces),
        ledger=ledger,
        settle=settle,
    )
