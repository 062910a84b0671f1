"""What ranks do with optimizers of torch: train, save, load in another stage or number of ranks, and go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kit import kit_of, open_engine
from rank_checkpoints import digest, rank_and_size, take

from infinity import utils
from infinity.engine import Engine
from infinity.errors import CheckpointError, InfinityError


@dataclass(frozen=True)
class Trained:
    """What a rank has seen: losses by step, digests of masters and of the optimizer's state in bits, its bytes."""

    losses: tuple[tuple[float, ...], ...]
    weights: str
    state: str
    state_bytes: int


def trained(engine: Engine, losses: list[tuple[float, ...]]) -> Trained:
    kept = engine.optimizer.state_dict()["state"]
    values = [(f"{number} {key}", torch.as_tensor(value)) for number, one in kept.items() for key, value in one.items()]
    measured = sum(line.used_bytes for line in engine.memory_report() if line.owner == "state of torch's optimizer")
    values.sort(key=lambda one: one[0])
    return Trained(tuple(losses), digest(sorted(engine.state_dict().items())), digest(values), measured)


def train_on(kit: str, config: Mapping[str, Any], until: int, save: str | None = None, load: str | None = None) -> Trained:
    """Train up to a step, from a checkpoint where one is named; save where asked."""
    with open_engine(kit_of(kit).build(seed=rank_and_size()[0]), config) as engine:
        if load is not None:
            engine.load_checkpoint(load)
        losses = take(engine, kit_of(kit), config, range(engine.global_steps, until))
        if save is not None:
            engine.save_checkpoint(save)
        return trained(engine, losses)


def read_and_write(config: Mapping[str, Any], key: str) -> tuple[bool, bool, bool]:
    """Return whether a full state is what local ones say, whether it can be replaced, and whether it goes there and back."""
    kit = kit_of("odd-mlp")
    with open_engine(kit.build(), config) as engine:
        take(engine, kit, config, range(1))
        parameter = engine.module.get_parameter("second.weight")
        full = utils.safe_get_full_optimizer_state(parameter, key)
        local = utils.safe_get_local_optimizer_state(parameter, key)
        assert full is not None
        assert local is not None
        agree = local.numel() == full.numel() or set(local.tolist()) <= set(full.flatten().tolist())
        doubled = full * 2
        utils.safe_set_full_optimizer_state(parameter, doubled, key)
        found = utils.safe_get_full_optimizer_state(parameter, key)
        state = engine.optimizer.state_dict()
        take(engine, kit, config, range(1, 2))
        engine.optimizer.load_state_dict(state)
        again = utils.safe_get_full_optimizer_state(parameter, key)
        assert found is not None
        assert again is not None
        return agree, torch.equal(found, doubled), torch.equal(again, doubled)


def open_with(given: str, config: Mapping[str, Any]) -> str:
    """Return what an engine with this optimizer of torch says: its notes, or its error."""
    model = kit_of("odd-mlp").build()
    make = getattr(torch.optim, given)
    try:
        with open_engine(model, config, optimizer=make(model.parameters())) as engine:
            return " ".join(engine.notes)
    except InfinityError as error:
        return str(error)


class Talkative(torch.optim.SGD):
    """Keeps on rank 1 what no checkpoint holds, until it is told to stop."""

    talks = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].pop("words", None)
                if self.talks and rank_and_size()[0] == 1:
                    self.state[parameter]["words"] = "none"
        return loss


def save_what_one_rank_cannot(config: Mapping[str, Any], directory: str) -> tuple[str, bool]:
    """Return how saving failed while rank 1 could not, and whether it goes on and saves afterwards."""
    kit = kit_of("odd-mlp")
    model = kit.build()
    optimizer = Talkative(model.parameters(), lr=0.05, momentum=0.9)
    with open_engine(model, config, optimizer=optimizer) as engine:
        take(engine, kit, config, range(1))
        said = ""
        try:
            engine.save_checkpoint(directory)
        except CheckpointError as error:
            said = str(error)
        Talkative.talks = False
        take(engine, kit, config, range(1, 2))
        return said, engine.save_checkpoint(directory).exists()
