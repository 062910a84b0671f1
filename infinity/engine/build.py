"""The composition root: from a module, a configuration and a placement to an engine.

Everything is decided first (cut, plan), then reserved (memory, disk), then filled. After any error nothing is left behind.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from infinity.aio.select import Probe
from infinity.comm.group import Group, minimum
from infinity.comm.launched import Ranks
from infinity.config import Config
from infinity.config.resolve import DEFAULT_SOURCE
from infinity.engine.activations import open_activation_meter
from infinity.engine.cut import DTYPE_NAMES, CutModel, cut
from infinity.engine.determinism import compute_deterministically
from infinity.engine.directories import Directories, open_directories
from infinity.engine.engine import Engine
from infinity.engine.exchange import Exchange
from infinity.engine.gradient_path import open_gradient_path
from infinity.engine.groups import Groups, put_into_place
from infinity.engine.in_place import Adoption, adoption
from infinity.engine.initial import Initializer, InitialValues, fill_shard
from infinity.engine.io_buffers import register_io_buffers
from infinity.engine.kept_states import KeptStates
from infinity.engine.loss_scaler import build_loss_scaler
from infinity.engine.lr_schedule import GivenScheduler, LrSchedule, build_schedule_of, build_torch_schedule
from infinity.engine.masters import Masters
from infinity.engine.model_settings import settle_model
from infinity.engine.optimizer import Optimizer
from infinity.engine.parameter_states import StateAccess, open_states
from infinity.engine.parts import EngineParts
from infinity.engine.persistence import Persistence
from infinity.engine.planned import (
    ActivationSizes,
    asked_reduction,
    cut_and_plan,
    grad_dtype_of,
    placement_notes,
    residencies_of,
    shares_of,
)
from infinity.engine.ranks import join_ranks, leave_at_exit
from infinity.engine.reserve import (
    open_gradient_slots,
    open_kept_weights,
    open_weight_slots,
)
from infinity.engine.results import IoFacts
from infinity.engine.take_over import free_values, move_buffers, refuse_loading, take_over
from infinity.engine.unit_calls import build_walk
from infinity.engine.update import Updater
from infinity.engine.update_rule import AdamRule, open_torch_rule_of
from infinity.engine.user_writes import UserWrites
from infinity.errors import IllegalTransition
from infinity.memory.base import measure_base
from infinity.memory.device import ComputeDevice, open_compute_device
from infinity.memory.host_allocator import tune_host_allocator
from infinity.memory.ledger import Ledger
from infinity.memory.pool import Lease
from infinity.optim.kernel import open_kernel
from infinity.optim.pipeline import IoPolicy
from infinity.optim.stream import open_update_stream
from infinity.placement import Placement, Plan
from infinity.states import Tier
from infinity.store.checksums import open_checksums
from infinity.store.extents import Shards
from infinity.store.layout import ELEMENT_BYTES
from infinity.store.store import Store, open_store
from infinity.telemetry.recorder import Recorder
from infinity.zero.gather import Copy, GatherParts
from infinity.zero.order import UnitOrder
from infinity.zero.randomness import Randomness
from infinity.zero.shard import Residency
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.weights import Slot, Weights

# What the recorder keeps: a few steps of a large model, about 6 MB.
_MAX_SPANS = 10_000


def build_engine(
    *,
    model: nn.Module,
    config: Config,
    groups: Groups,
    ranks: Ranks,
    placement: Placement | None,
    lr_scheduler: GivenScheduler | None,
    init: Initializer | None,
    activation_bytes: int | None,
    kept_bytes: Callable[[str], int] | None,
    run_name: str,
    num_steps: int | None,
    adopt: Path | None,
    probed: Mapping[Path, Probe] | None,
    on_plan: Callable[[Plan], None] | None,
) -> Engine:
    """Return the engine of a module; see `initialize`. After any error nothing is left behind and the model is as it was."""
    optimizer = Optimizer(groups.values, groups.defaults, decoupled=groups.decoupled)
    if lr_scheduler is None:
        lr_schedule: LrSchedule = build_schedule_of(config.scheduler, optimizer.param_groups, num_steps)
    else:
        lr_schedule = build_torch_schedule(lr_scheduler, optimizer.param_groups)
    allocator = tune_host_allocator()
    base_bytes = measure_base()
    compute, recorder = open_compute_device(), Recorder(max_spans=_MAX_SPANS)
    asked = placement or Placement.from_config(config)
    adopted = adoption(adopt, num_ranks=ranks.world_size) if adopt is not None else None
    recorded_bytes = adopted.cpu_memory_bytes if adopted is not None else None
    with ExitStack() as undo, ExitStack() as resources:
        group = join_ranks(compute.torch_device, recorder, resources)
        pieces, plan = cut_and_plan(
            lambda stage: cut(model, config, groups.index_of, stage=stage, ranks=ranks, torch_values=groups.torch_values),
            config,
            asked,
            compute,
            ActivationSizes(activation_bytes, kept_bytes),
            ranks,
            recorded_bytes,
            agree=lambda num_bytes: int(minimum(group, num_bytes, what="memory budget")),
        )
        shares = [shares_of(unit, layout) for unit, layout in zip(plan.units, pieces.layouts, strict=True)]
        if adopted is not None:
            adopted.require_shares(shares)
        placed = tuple(zip(pieces.layouts, shares, strict=True))
        directories = open_directories(
            config,
            placed,
            grad_element_bytes=ELEMENT_BYTES[grad_dtype_of(config)],
            spare_memory_bytes=max(0, dict(plan.budgets)[Tier.CPU] - plan.memory_bytes(Tier.CPU)),
            num_local_ranks=ranks.local_world_size,
            adopted=adopted,
            probed=probed or {},
            resources=resources,
        )
        plan = replace(plan, directories=directories.lines)
        if on_plan is not None:
            on_plan(plan)
        request = EngineRequest(
            model=model,
            config=config,
            groups=groups,
            ranks=ranks,
            pieces=pieces,
            plan=plan,
            placed=placed,
            directories=directories,
            compute=compute,
            init=init,
            run_name=run_name if ranks.world_size == 1 else f"{run_name}-rank{ranks.global_rank}",
            group=group,
            recorder=recorder,
            optimizer=optimizer,
            lr_schedule=lr_schedule,
            adopted=adopted,
            base_bytes=base_bytes,
            notes=(
                *config.notes(),
                *groups.notes,
                *groups.parts_notes(pieces.unit_layouts),
                *_schedule_notes(config, lr_scheduler),
                *allocator.notes,
                *placement_notes(asked, pieces, compute),
                *directories.notes,
            ),
        )
        return _compose(request, resources, undo)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Everything that is decided before anything is reserved."""

    model: nn.Module
    config: Config
    groups: Groups
    ranks: Ranks
    pieces: CutModel
    plan: Plan
    placed: Shards
    directories: Directories
    compute: ComputeDevice
    init: Initializer | None
    run_name: str
    group: Group
    recorder: Recorder
    optimizer: Optimizer
    lr_schedule: LrSchedule
    adopted: Adoption | None  # the checkpoint in place that is taken over
    base_bytes: int  # RSS before any model exists
    notes: tuple[str, ...]


def _compose(request: EngineRequest, resources: ExitStack, undo: ExitStack) -> Engine:
    model, config, pieces, plan, compute = request.model, request.config, request.pieces, request.plan, request.compute
    device, transfers = compute.torch_device, compute.transfers
    if config.infinity.deterministic:
        compute_deterministically(resources)
    model_notes = settle_model(model, resources)
    ledger = Ledger({tier: budget for tier, budget in plan.budgets})
    recorder, group = request.recorder, request.group
    is_split = any(layouts.is_split for layouts in pieces.unit_layouts)
    pin = config.pin_memory and compute.memory is not None
    grad_dtype = grad_dtype_of(config)
    placed, io_engine = request.placed, request.directories.engine
    store = open_store(
        directories=config.nvme_directories,
        engine=io_engine,
        ledger=ledger,
        recorder=recorder,
        run_name=request.run_name,
        pin=pin,
        num_tile_slots=max(1, plan.num_tile_slots),
        shards=placed,
        grad_element_bytes=ELEMENT_BYTES[grad_dtype],
        stripes=request.directories.stripes,
        adopt=request.adopted.run_paths[0] if request.adopted is not None else None,
        checksums=open_checksums() if config.infinity.checksums and plan.uses_nvme else None,
    )
    resources.callback(store.close, keep=True)
    kernel = open_kernel(num_threads=config.infinity.adam_threads)
    # Given back when the stream fills none any more.
    slots = open_weight_slots(plan, ledger, compute, pin, resources, is_split=is_split)
    stream = open_update_stream(
        store=store,
        shards=placed,
        kernel=kernel,
        recorder=recorder,
        ledger=ledger,
        grad_element_bytes=ELEMENT_BYTES[grad_dtype],
        lease_weights=_refuse_lease,
        policy=IoPolicy(config.infinity.io_policy),
    )
    resources.callback(stream.close)
    gradient_slots = open_gradient_slots(plan, ledger, pin, resources)
    register_io_buffers(io_engine, store, stream, slots, gradient_slots, placed, resources)
    values = InitialValues(request.init, group, device)
    if request.adopted is None:
        _fill(store, pieces, values, slots)
    in_host_memory = {
        layout.index: buffer for layout in pieces.layouts if (buffer := store.weights(layout.index)) is not None
    }
    residency = residencies_of(pieces, plan)
    kept = {
        index: open_kept_weights(in_host_memory[index], pieces.unit_layouts[index], compute, ledger, resources)
        for index, one in residency.items()
        if one is not Residency.ABSENT
    }
    shards = take_over(pieces, residency, kept, device, undo)
    move_buffers(model, compute, ledger, resources, undo)
    values.share_buffers(model)
    resources.callback(refuse_loading(model))
    weights = Weights(
        shards,
        slots,
        kept,
        in_host_memory,
        lambda shard, buffer, fetch: stream.load(shard, buffer, fetch=fetch),
        GatherParts(group, transfers, has_device_memory=compute.memory is not None) if is_split else Copy(transfers),
        transfers,
        recorder,
    )
    gradient_path = open_gradient_path(
        group=group,
        store=store,
        pieces=pieces,
        plan=plan,
        shards=shards,
        slots=gradient_slots,
        kernel=kernel,
        grad_dtype=grad_dtype,
        asked_reduction=asked_reduction(config),
        sent_dtype=DTYPE_NAMES[config.communication_data_type],
        update_now=weights.update_now,
        compute=compute,
        ledger=ledger,
        resources=resources,
    )
    gradients, sums = gradient_path.waiting, gradient_path.sums
    randomness = Randomness(config.seed, device)
    activations = open_activation_meter(
        ledger, compute, host_base_bytes=request.base_bytes, planned_bytes=plan.memory_bytes(Tier.CPU)
    )
    walk = build_walk(model, pieces, shards, weights, sums, randomness, device, config, activations)
    order = UnitOrder(len(pieces.units))
    optimizer, loss_scaler = request.optimizer, build_loss_scaler(config)
    put_into_place(request.groups, shards, undo)
    torch_rule = open_torch_rule_of(request.groups, shards, store, grad_dtype, ledger, weights.settle, undo)
    updater = Updater(
        shards=shards,
        gradients=gradients,
        user_writes=UserWrites(shards, store),
        stream=stream,
        weights=weights,
        rule=torch_rule or AdamRule(stream, optimizer, grad_dtype),
        optimizer=optimizer,
        lr_schedule=request.lr_schedule,
        loss_scaler=loss_scaler,
        agreement=gradient_path.agreement,
        reduction=gradient_path.reduction,
        max_norm=config.gradient_clipping,
        max_skipped_in_a_row=config.infinity.max_skipped_in_a_row,
    )
    exchange = Exchange(group, device)
    masters, kept_states = Masters(store, weights, exchange, ledger), KeptStates(torch_rule, exchange)
    persistence = Persistence(
        module=model,
        shards=shards,
        store=store,
        weights=weights,
        masters=masters,
        exchange=exchange,
        kept=kept_states,
        optimizer=optimizer,
        lr_schedule=request.lr_schedule,
        loss_scaler=loss_scaler,
        precision=config.precision,
        staging=lambda _: slots[0].host,
        adopted=request.adopted.state if request.adopted is not None else None,
        cpu_memory_bytes=dict(plan.budgets)[Tier.CPU],
    )
    walk.attach()
    resources.callback(walk.detach)
    resources.callback(transfers.synchronize)  # before any memory is given back
    weights.show_resident()
    weights.expect(order.vertical_sequence(walk.groups))
    recorder.take_counters()  # what initialisation wrote belongs to no step
    io_facts = io_engine.facts
    vertical = VerticalSchedule(walk, weights, order, recorder, device)
    everything = _closed_at_exit(resources.pop_all(), group)
    engine = Engine(
        EngineParts(
            module=model,
            config=config,
            plan=plan,
            device=device,
            ledger=ledger,
            recorder=recorder,
            walk=walk,
            weights=weights,
            order=order,
            vertical=vertical,
            randomness=randomness,
            group=group,
            agreement=gradient_path.agreement,
            updater=updater,
            optimizer=optimizer,
            lr_schedule=request.lr_schedule,
            loss_scaler=loss_scaler,
            persistence=persistence,
            activations=activations,
            batch=config.batch(request.ranks.world_size),
            ranks=request.ranks,
            io=IoFacts(io_engine.name, io_facts.registered_files, io_facts.registered_buffers),
            notes=(*request.notes, *pieces.notes(), *model_notes, *io_facts.notes),
            resources=everything,
        )
    )
    optimizer.serve(engine.step, engine.zero_grad)
    states = StateAccess(
        door=engine,
        store=store,
        weights=weights,
        gradients=gradients,
        loss_scale=lambda: loss_scaler.scale,
        masters=masters,
        exchange=exchange,
        kept=kept_states,
        staging=slots[0].host,
        ledger=ledger,
        compute_tier=compute.tier,
    )
    everything.callback(open_states(shards, states))
    undo.pop_all()  # nothing can fail any more: what would put the model back is let go of
    free_values(shards)
    return engine


def _closed_at_exit(resources: ExitStack, group: Group) -> ExitStack:
    """Let the end of the program close what nobody closed, so that no swap files stay; return the same stack."""
    owner = os.getpid()

    def close() -> None:
        if os.getpid() == owner:  # a forked child ends, too, and must leave the files alone
            leave_at_exit(group)
            resources.close()

    atexit.register(close)
    resources.callback(atexit.unregister, close)
    return resources


def _fill(store: Store, pieces: CutModel, values: InitialValues, slots: Sequence[Slot]) -> None:
    """Write the initial values of every group, with the slots in turn as staging."""
    written: list[Callable[[], None]] = []
    for number, (group, layout) in enumerate(zip(pieces.groups, pieces.layouts, strict=True)):
        if len(written) >= len(slots):
            written.pop(0)()
        written.append(fill_shard(store, group, layout, values, slots[number % len(slots)].host).wait)
    for wait in written:
        wait()


def _schedule_notes(config: Config, given: GivenScheduler | None) -> tuple[str, ...]:
    if given is None or config.sources()["scheduler.type"].source == DEFAULT_SOURCE:
        return ()
    return ("scheduler: has no effect because initialize was given an lr_scheduler.",)


def _refuse_lease(shard: int) -> Lease:
    raise IllegalTransition(f"Shard {shard} was left with an update that nobody made.")
