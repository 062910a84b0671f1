"""How the calls of a model's units are made: with which weights, and which of them run again in backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.activations import ActivationMeter
from infinity.engine.cut import CutModel
from infinity.zero.binding import root_bindings, unit_bindings
from infinity.zero.gradients import GradientSums
from infinity.zero.randomness import Randomness
from infinity.zero.shard import Residency, Shard
from infinity.zero.unit_call import UnitRuntime
from infinity.zero.walk import Walk
from infinity.zero.weights import Weights


def build_walk(
    module: nn.Module,
    pieces: CutModel,
    shards: Sequence[Shard],
    weights: Weights,
    sums: GradientSums,
    randomness: Randomness,
    device: torch.device,
    config: Config,
    activations: ActivationMeter,
) -> Walk:
    """Return the walk over the model's units; those whose weights leave between forward and backward run again there."""
    device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    runtimes = [
        UnitRuntime(
            unit,
            unit.module.forward,
            unit_bindings(unit, shards),
            weights,
            sums,
            randomness,
            device_types,
            config.infinity.check,
            activations.sample,
        )
        for unit in pieces.units
    ]
    absent = {shard.index for shard in shards if shard.residency is Residency.ABSENT}
    rerun = [config.infinity.recompute or bool(absent.intersection(unit.groups)) for unit in pieces.units]
    return Walk(module, runtimes, rerun, root_bindings(pieces.units, shards), weights, sums, randomness)
