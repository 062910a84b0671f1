"""What an engine is composed of; `build.py` puts it together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from infinity.comm.group import Group
from infinity.comm.launched import Ranks
from infinity.config import Config
from infinity.config.batch import BatchSizes
from infinity.engine.activations import ActivationMeter
from infinity.engine.agreement import Agreement
from infinity.engine.loss_scaler import LossScaler
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.persistence import Persistence
from infinity.engine.results import IoFacts
from infinity.engine.update import Updater
from infinity.memory.ledger import Ledger
from infinity.placement.plan import Plan
from infinity.telemetry.recorder import Recorder
from infinity.zero.order import UnitOrder
from infinity.zero.randomness import Randomness
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.walk import Walk
from infinity.zero.weights import Weights


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that an engine is composed of."""

    module: nn.Module
    config: Config
    plan: Plan
    device: torch.device
    ledger: Ledger
    recorder: Recorder
    walk: Walk
    weights: Weights
    order: UnitOrder
    vertical: VerticalSchedule
    randomness: Randomness
    group: Group
    agreement: Agreement
    updater: Updater
    optimizer: Optimizer
    lr_schedule: LrSchedule
    loss_scaler: LossScaler
    persistence: Persistence
    activations: ActivationMeter
    batch: BatchSizes
    ranks: Ranks
    io: IoFacts
    notes: tuple[str, ...]  # what was not available, in sentences
    resources: ExitStack
