"""The front door: `initialize` takes what users give it under the names that they know, and returns the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from infinity.aio.select import Probe
from infinity.comm.launched import launched_ranks
from infinity.config import Config
from infinity.engine.build import build_engine
from infinity.engine.engine import Engine
from infinity.engine.groups import GivenOptimizer, GivenParameters, groups_of
from infinity.engine.initial import Initializer
from infinity.engine.launch import GivenConfig, given_config
from infinity.engine.loader import CollateFunction, open_loader
from infinity.engine.lr_schedule import GivenScheduler, LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.take_over import require_own_weights
from infinity.errors import ConfigError
from infinity.memory.device import take_local_gpu
from infinity.placement import Placement, Plan


@dataclass(frozen=True, slots=True)
class Initialized:
    """The result of `initialize`; also unpacks as (engine, optimizer, dataloader, lr_scheduler)."""

    engine: Engine
    optimizer: Optimizer
    dataloader: DataLoader[Any] | None
    lr_scheduler: LrSchedule

    def __iter__(self) -> Iterator[Any]:
        return iter((self.engine, self.optimizer, self.dataloader, self.lr_scheduler))


def initialize(
    args: object | None = None,
    model: nn.Module | None = None,
    optimizer: GivenOptimizer | None = None,
    model_parameters: GivenParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: GivenScheduler | None = None,
    distributed_port: int = 29500,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: CollateFunction | None = None,
    config: GivenConfig | None = None,
    mesh_param: None = None,
    config_params: GivenConfig | None = None,
    *,
    placement: Placement | None = None,
    init: Initializer | None = None,
    activation_bytes: int | None = None,
    kept_bytes: Callable[[str], int] | None = None,
    run_name: str = "run",
    num_steps: int | None = None,
    adopt: Path | None = None,
    probed: Mapping[Path, Probe] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Initialized:
    """Take over a module for training and return its engine.

    `config` (or `config_params`, or `args.deepspeed_config`) is a dict with DeepSpeed's keys, the path of a JSON file, or a
    Config. `model_parameters` are the parameters to train, or groups of them as torch.optim takes them, with their own lr,
    betas, eps and weight_decay; by default all that require grad. `optimizer` is an optimizer of torch, or a function that
    makes one from `model_parameters`: its groups are taken over and change the hyper-parameters from then on. Adam and AdamW
    are infinity's own, on every tier; any other makes its updates itself, with all state in memory.
    `training_data` becomes a data loader of micro-batches. `distributed_port` and `dist_init_required` change nothing:
    the launcher says where ranks meet. `mpu` and `mesh_param` are refused, for no model is split over ranks by its own code.

    `lr_scheduler` takes the place of the section `scheduler`: a scheduler of torch over as many groups, or a function
    that makes one over the optimizer that it is given.

    `placement` says what lives in which tier, by default what the configuration asks for. The model may be on the meta
    device: `init(module, name)` or each module's reset_parameters() then gives its values, one module at a time.
    `activation_bytes` is what torch will need inside units, and `kept_bytes(unit name)` what autograd keeps of one
    micro-batch of a unit whose weights stay, where they are known. `num_steps` is the length of the run, which linear and
    cosine schedules need. `adopt` is a checkpoint that is to be loaded next: one that was committed in place can only be
    taken over here. `probed` is what was found to work in NVMe directories, by real path, where that was tried already.
    `on_plan` is called with the plan, and what each directory will take, before any of it is reserved.

    Raises ConfigError, DoesNotFit, ModelError, OverBudget, StorageError, and IllegalTransition for a model that an engine
    has or had; nothing is left behind then, and the model is as it was.
    """
    if mpu is not None or mesh_param is not None:
        raise ConfigError("initialize got mpu or mesh_param: model parallelism is not supported.", remedy="Leave them out.")
    resolved = Config.from_any(given_config(config, config_params, args))
    ranks = launched_ranks()
    if ranks.world_size > 1:
        take_local_gpu(ranks.local_rank)
    model = require_own_weights(model)
    engine = build_engine(
        model=model,
        config=resolved,
        groups=groups_of(model, resolved.optimizer, model_parameters, optimizer),
        ranks=ranks,
        placement=placement,
        lr_scheduler=lr_scheduler,
        init=init,
        activation_bytes=activation_bytes,
        kept_bytes=kept_bytes,
        run_name=run_name,
        num_steps=num_steps,
        adopt=adopt,
        probed=probed,
        on_plan=on_plan,
    )
    loader = None
    if training_data is not None:
        loader = open_loader(
            training_data,
            resolved.batch(ranks.world_size),
            ranks.global_rank,
            seed=resolved.seed,
            drop_last=resolved.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    return Initialized(engine, engine.optimizer, loader, engine.lr_scheduler)
