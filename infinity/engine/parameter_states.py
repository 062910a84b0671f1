"""What the user reads and writes of one parameter's states, in whatever tier they live: master, moments and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.engine.exchange import Exchange
from infinity.engine.kept_states import KeptStates
from infinity.engine.masters import OWNER, Masters
from infinity.engine.planes import has_plane, local_elements, read_plane, runs_of, section_of, weights_of, write_plane
from infinity.engine.waiting_gradients import WaitingGradients
from infinity.errors import ModelError
from infinity.memory.arena import Buffer
from infinity.memory.ledger import Ledger
from infinity.optim.reference import split_master
from infinity.states import Tier
from infinity.store.layout import ParameterSpec
from infinity.store.store import Store
from infinity.zero.access import forget_states, leave_states
from infinity.zero.shard import TORCH_DTYPES, Shard
from infinity.zero.weights import Weights

MASTER = "fp32"
# The planes that hold what the weights do not say of a master: the user sees the master itself.
_MASTER_PLANES = ("master", "master_low")


class StepDoor(Protocol):
    """What the engine does before its states may be looked at or changed; all raise IllegalTransition where they may not."""

    def synchronize(self) -> None: ...

    def require_no_graph(self, call: str) -> None:
        """No backward is to come whose forward has used the weights."""
        ...

    def finish_gradients(self) -> None:
        """The gradients of the step are final from now on."""
        ...


@dataclass(frozen=True, slots=True)
class StateAccess:
    """What the states of every parameter are reached through."""

    door: StepDoor
    store: Store
    weights: Weights
    gradients: WaitingGradients
    loss_scale: Callable[[], float]  # by which gradients that wait are too large
    masters: Masters
    exchange: Exchange
    kept: KeptStates
    staging: Buffer  # host memory for one shard's weights
    ledger: Ledger
    compute_tier: Tier


@dataclass(frozen=True, slots=True)
class StatesOfParameter:
    """The handle that `zero.access.states_of` finds (ParameterStates)."""

    access: StateAccess
    shard: Shard
    spec: ParameterSpec

    @property
    def name(self) -> str:
        return self.spec.name

    def hold_weight(self) -> torch.Tensor:
        access, index = self.access, self.shard.index
        access.door.synchronize()
        access.ledger.take(access.compute_tier, OWNER, self._weight_bytes)
        views = access.weights.acquire(index)
        try:
            return views[self.spec.name].detach().clone()
        finally:
            access.weights.release(index)

    def let_go(self) -> None:
        self.access.ledger.give(self.access.compute_tier, OWNER, self._weight_bytes)

    def take_from(self, rank: int, weight: torch.Tensor) -> None:
        exchange = self.access.exchange
        if exchange.group.size > 1:
            values = weight.reshape(-1).to("cpu")
            exchange.broadcast(values, source=rank, what=f"what rank {rank} wrote to {self.name}")
            weight.copy_(values.view(weight.shape))

    def on_every_rank(self, is_so: bool) -> list[bool]:
        return [bool(theirs) for theirs in self.access.exchange.group.gather(is_so, what=f"writes to {self.name}")]

    def get(self, state: str, *, local: bool) -> torch.Tensor | None:
        self.access.door.synchronize()
        if state == MASTER:
            masters = self.access.masters
            return masters.own(self.shard, self.spec) if local else masters.whole(self.shard, self.spec)
        if self._is_kept:
            return self.access.kept.get(self.shard.layout, self.spec, state, local=local)
        if not self._has(state):
            return None
        return self._shaped(read_plane(self.access.store, self.shard.layout, self.name, state), local, state)

    def set(self, state: str, value: torch.Tensor, *, local: bool) -> None:
        self.access.door.synchronize()
        self.access.door.require_no_graph(f"set {state} of {self.name}")
        values = self._flat(value, local)
        if state == MASTER:
            self._set_master(values)
        elif self._is_kept:
            self.access.kept.put(self.name, state, values)
        elif self._has(state):
            write_plane(self.access.store, self.shard.layout, self.name, state, values)
        else:
            raise ModelError(f"Parameter {self.name} is frozen: it has no {state}.", remedy="Set states of trained ones.")

    def optimizer_state(self) -> dict[str, object]:
        self.access.door.synchronize()
        if self._is_kept:
            return self.access.kept.everything(self.shard.layout, self.spec)
        return {name: self.get(name, local=False) for name in self._moments if self.spec.trainable}

    def replace_optimizer_state(self, state: Mapping[str, object]) -> None:
        self.access.door.synchronize()
        self.access.door.require_no_graph(f"load_state_dict with {self.name}")
        if self._is_kept:
            self.access.kept.replace(self.spec, state)
            return
        if self.spec.trainable and set(state) not in (set(), set(self._moments)):
            raise ModelError(
                f"The state of {self.name} has {', '.join(state)}; its optimizer keeps {', '.join(self._moments)}.",
                remedy="Load the state of an Adam or AdamW.",
            )
        for name in self._moments if self.spec.trainable else ():
            value = state.get(name)
            filled = value if isinstance(value, torch.Tensor) else torch.zeros(self.spec.shape)
            write_plane(self.access.store, self.shard.layout, self.name, name, self._flat(filled, local=False))

    def get_gradient(self, *, local: bool) -> torch.Tensor | None:
        self.access.door.finish_gradients()
        values = self.access.gradients.read(self.shard.index, self.name)
        return None if values is None else self._shaped(values.float() / self.access.loss_scale(), local, "gradient")

    def set_gradient(self, value: torch.Tensor, *, local: bool) -> None:
        self.access.door.finish_gradients()
        values = self._flat(value, local) * self.access.loss_scale()
        self.access.gradients.write(self.shard.index, self.name, values)

    @property
    def _is_kept(self) -> bool:
        """Whether an optimizer of torch keeps what is not the master."""
        return self.spec.trainable and not self.spec.has_moments

    @property
    def _weight_bytes(self) -> int:
        return self.spec.numel * TORCH_DTYPES[self.spec.dtype].itemsize

    def _has(self, state: str) -> bool:
        """Return whether the parameter has this state. Raises ModelError for what is none of any parameter."""
        known = self._moments
        if self.spec.trainable and state not in known:
            raise ModelError(f"There is no optimizer state {state!r}.", remedy=f"There are {MASTER}, {', '.join(known)}.")
        return has_plane(self.shard.layout, self.name, state)

    @property
    def _moments(self) -> tuple[str, ...]:
        """The planes that hold more than masters, in their order."""
        planes = (plane.name for section in self.shard.layout.sections for plane in section.planes)
        return tuple(dict.fromkeys(name for name in planes if name not in _MASTER_PLANES))

    def _set_master(self, values: torch.Tensor) -> None:
        layout, store = self.shard.layout, self.access.store
        weights, low = values, None
        if self.spec.dtype == "bfloat16" and not has_plane(layout, self.name, "master"):
            weights, low = split_master(values)
        if has_plane(layout, self.name, "master_low") and low is not None:
            write_plane(store, layout, self.name, "master_low", low)
        if has_plane(layout, self.name, "master"):
            write_plane(store, layout, self.name, "master", values)
        self._set_weights(weights)

    def _set_weights(self, values: torch.Tensor) -> None:
        layout, access = self.shard.layout, self.access
        access.weights.forget()
        buffer = access.store.weights(layout.index)
        if buffer is None:
            buffer = access.staging
            access.store.fetch_weights(layout.index, buffer).wait()
        elements = weights_of(layout, section_of(layout, self.name), buffer)
        position = 0
        for run in runs_of(layout, self.name):
            elements[run.offset : run.offset + run.length] = values[position : position + run.length]
            position += run.length
        access.store.publish_weights(layout.index, buffer).wait()
        access.weights.show_resident()
        access.weights.rewind()

    def _shaped(self, own: torch.Tensor, local: bool, what: str) -> torch.Tensor:
        """Return this rank's elements as they are, or those of all ranks in the parameter's shape."""
        if local:
            return own
        return self.access.exchange.whole(self.shard.layout, self.name, own, what=what).view(self.spec.shape)

    def _local_part(self, full: torch.Tensor) -> torch.Tensor:
        flat = full.reshape(-1)
        runs = runs_of(self.shard.layout, self.name)
        return torch.cat([flat[:0], *(flat[run.parameter_offset : run.parameter_offset + run.length] for run in runs)])

    def _flat(self, value: torch.Tensor, local: bool) -> torch.Tensor:
        """Return this rank's elements, fp32 and 1-D. Raises ModelError for another shape."""
        needed = (local_elements(self.shard.layout, self.name),) if local else self.spec.shape
        if tuple(value.shape) != needed:
            raise ModelError(
                f"Parameter {self.name}: a value of shape {tuple(value.shape)} was given; it has {needed}.",
                remedy="Give what the get function of the same name returns.",
            )
        values = value.detach().to("cpu", torch.float32)
        return values.contiguous() if local else self._local_part(values)


def open_states(shards: tuple[Shard, ...], access: StateAccess) -> Callable[[], None]:
    """Leave the states on every parameter of the module; return what takes them away again."""
    parameters = []
    for shard in shards:
        for spec in shard.layout.specs:
            leave_states(shard.outside[spec.name], StatesOfParameter(access, shard, spec))
            parameters.append(shard.outside[spec.name])

    def forget() -> None:
        for parameter in parameters:
            forget_states(parameter)

    return forget
