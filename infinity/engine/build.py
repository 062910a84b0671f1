"""The composition root: from a module, a configuration and a placement to an engine.

Everything is decided first (cut, plan), then reserved (memory, disk), then filled. After any error nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from infinity.aio.engine import Engine as IoEngine
from infinity.aio.select import open_engine, probe
from infinity.byte_sizes import PAGE_BYTES
from infinity.config import Config
from infinity.engine.activations import ActivationMeter
from infinity.engine.cut import CutModel, cut
from infinity.engine.engine import Engine, EngineParts
from infinity.engine.initial import InitializedValues, Initializer, fill_shard
from infinity.engine.optimizer import LrSchedule, Optimizer, build_optimizer
from infinity.engine.persistence import Persistence
from infinity.engine.update import Updater
from infinity.engine.waiting_gradients import WaitingGradients
from infinity.errors import DoesNotFit, IllegalTransition
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.base import measure_base
from infinity.memory.host_allocator import tune_host_allocator
from infinity.memory.ledger import Ledger
from infinity.memory.limits import host_limit_bytes
from infinity.memory.pool import BufferPool, Lease, open_pool
from infinity.memory.transfer import open_transfers
from infinity.optim.kernel import open_kernel
from infinity.optim.pipeline import IoPolicy
from infinity.optim.schedules import build_schedule
from infinity.optim.stream import open_update_stream
from infinity.placement import Placement, Plan, PlanRequest, Schedule, make_plan
from infinity.placement.plan import Owner, UnitPlan
from infinity.states import Tier
from infinity.store.checks import check_directory
from infinity.store.layout import ELEMENT_BYTES, ParameterSpec, ShardLayout
from infinity.store.shares import ShardShares
from infinity.store.store import Store, open_store
from infinity.telemetry.recorder import Recorder
from infinity.zero.absent import AbsentParameter
from infinity.zero.binding import root_bindings, unit_bindings
from infinity.zero.gradients import GradientSums
from infinity.zero.order import UnitOrder
from infinity.zero.randomness import Randomness
from infinity.zero.shard import TORCH_DTYPES, Residency, Shard
from infinity.zero.unit_call import UnitRuntime
from infinity.zero.units import ParameterGroup
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.walk import Walk
from infinity.zero.weights import Slot, Weights

# Of the memory that the machine has free, what is left to the system and to what nobody can foresee.
_HEADROOM = 0.1
# Of the budget, what is kept for activations where nobody says how many there are; measured from the first step on.
_ACTIVATION_SHARE = 0.2
_GRAD_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_WEIGHT_SLOTS_WANTED = (3, 2)  # one unit runs, one is fetched, one is written; two do where memory is scarce


@dataclass(frozen=True, slots=True)
class Initialized:
    """The result of `initialize`; also unpacks as (engine, optimizer, dataloader, lr_scheduler)."""

    engine: Engine
    optimizer: Optimizer
    dataloader: None
    lr_scheduler: LrSchedule

    def __iter__(self) -> Iterator[object]:
        return iter((self.engine, self.optimizer, self.dataloader, self.lr_scheduler))


def initialize(
    *,
    model: nn.Module,
    config: Config | Mapping[str, object] | str | Path | None = None,
    placement: Placement | None = None,
    init: Initializer | None = None,
    activation_bytes: int | None = None,
    run_name: str = "run",
    num_steps: int | None = None,
) -> Initialized:
    """Take over a module for training and return its engine.

    `config` is a dict with DeepSpeed's keys, the path of a JSON file, or a Config. `placement` says what lives in which
    tier, by default what the configuration asks for. The model may be on the meta device: `init(module, name)` or each
    module's reset_parameters() then gives its values, one module at a time. `activation_bytes` is what torch will need
    inside units, where it is known. `num_steps` is the length of the run, which linear and cosine schedules need.

    Raises ConfigError, DoesNotFit, ModelError, OverBudget, StorageError; nothing is left behind then.
    """
    resolved = Config.from_any(config)
    allocator = tune_host_allocator()
    base_bytes = measure_base()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    pieces = cut(model, resolved)
    plan = plan_for(pieces, resolved, placement or Placement.from_config(resolved), device, activation_bytes)
    with ExitStack() as resources:
        engine = _compose(
            model, resolved, pieces, plan, device, resources, init, run_name, num_steps, base_bytes, allocator.notes
        )
    return Initialized(engine, engine.optimizer, None, engine.lr_scheduler)


def plan_for(
    pieces: CutModel, config: Config, placement: Placement, device: torch.device, activation_bytes: int | None = None
) -> Plan:
    """Return the plan for a cut model. Raises DoesNotFit."""
    own = config.infinity
    cpu_bytes = own.cpu_memory or int(host_limit_bytes().num_bytes * (1 - _HEADROOM))
    gpu_bytes = None
    if device.type == "cuda":
        gpu_bytes = own.gpu_memory or int(torch.cuda.mem_get_info(device)[0] * (1 - _HEADROOM))
    compute_bytes = cpu_bytes if gpu_bytes is None else gpu_bytes
    request = PlanRequest(
        units=pieces.sizes(),
        placement=placement,
        cpu_memory_bytes=cpu_bytes,
        gpu_memory_bytes=gpu_bytes,
        num_micro_batches=config.batch(1).num_micro_batches,
        activation_bytes=activation_bytes if activation_bytes is not None else int(compute_bytes * _ACTIVATION_SHARE),
        grad_element_bytes=ELEMENT_BYTES[_GRAD_DTYPES[config.grad_dtype]],
        tile_elements=pieces.tile_elements,
        schedule=Schedule(own.schedule),
        recompute=own.recompute,
        root_bytes=pieces.buffer_bytes(),
        has_nvme=bool(config.nvme_directories),
    )
    if own.tile_slots is not None:
        request = replace(request, min_tile_slots=min(own.tile_slots, request.min_tile_slots), max_tile_slots=own.tile_slots)
    wanted = _WEIGHT_SLOTS_WANTED if own.weight_slots is None else (own.weight_slots,)
    return _first_that_fits([replace(request, num_weight_slots=count) for count in wanted])


def _first_that_fits(requests: Sequence[PlanRequest]) -> Plan:
    for request in requests[:-1]:
        try:
            return make_plan(request)
        except DoesNotFit:
            continue
    return make_plan(requests[-1])


def _compose(
    model: nn.Module, config: Config, pieces: CutModel, plan: Plan, device: torch.device, resources: ExitStack,
    init: Initializer | None, run_name: str, num_steps: int | None, base_bytes: int,
    allocator_notes: tuple[str, ...],
) -> Engine:  # fmt: skip
    ledger = Ledger({tier: budget for tier, budget in plan.budgets})
    recorder = Recorder()
    transfers = open_transfers(device)
    pin = config.pin_memory and device.type == "cuda"
    grad_dtype = _GRAD_DTYPES[config.grad_dtype]
    placed = tuple((layout, _shares(unit, layout)) for layout, unit in zip(pieces.layouts, plan.units, strict=True))
    io_engine, io_notes = _open_io(config, plan, resources)
    store = open_store(
        directories=config.nvme_directories, engine=io_engine, ledger=ledger, recorder=recorder, run_name=run_name, pin=pin,
        num_tile_slots=max(1, plan.num_tile_slots), shards=placed, grad_element_bytes=ELEMENT_BYTES[grad_dtype],
    )  # fmt: skip
    resources.callback(store.close)
    kernel = open_kernel()
    stream = open_update_stream(
        store=store, shards=placed, kernel=kernel, recorder=recorder, ledger=ledger, grad_element_bytes=ELEMENT_BYTES[grad_dtype],
        lease_weights=_refuse_lease, policy=IoPolicy(config.infinity.io_policy), pin=pin,
    )  # fmt: skip
    resources.callback(stream.close)
    slots = _open_weight_slots(plan, pieces.layouts, ledger, device, pin, resources)
    _fill(store, pieces, InitializedValues(init), slots)
    shards = _take_over(pieces, plan, store, device)
    kept = {shard.index: _kept_slot(store, shard, device) for shard in shards if shard.residency is not Residency.ABSENT}
    weights = Weights(
        shards, slots, kept, lambda shard, buffer, fetch: stream.load(shard, buffer, fetch=fetch), transfers, recorder
    )
    gradient_slots = _open_gradient_slots(plan, ledger, pin, resources)
    gradients = WaitingGradients(
        store=store, layouts=pieces.layouts, slots=gradient_slots, kernel=kernel, grad_dtype=grad_dtype,
        update_now=weights.update_now, device=device,
    )  # fmt: skip
    sums = GradientSums(shards, gradients)
    randomness = Randomness(config.seed, device)
    activations = ActivationMeter(ledger, device, base_bytes)
    walk = _build_walk(model, pieces, shards, plan, weights, sums, randomness, device, config, activations)
    order = UnitOrder(len(pieces.units))
    optimizer = build_optimizer(config.optimizer)
    lr_schedule = _lr_schedule(config, num_steps)
    updater = Updater(
        shards=shards, gradients=gradients, stream=stream, weights=weights, optimizer=optimizer, lr_schedule=lr_schedule,
        max_norm=config.gradient_clipping, grad_dtype=grad_dtype,
    )  # fmt: skip
    persistence = Persistence(
        module=model, shards=shards, store=store, weights=weights, optimizer=optimizer, lr_schedule=lr_schedule,
        precision="bf16" if config.bf16.enabled else "fp32", staging=lambda _: slots[0].host,
    )  # fmt: skip
    walk.attach()
    resources.callback(walk.detach)
    weights.expect(order.vertical_sequence(walk.groups))
    recorder.take_counters()  # what initialisation wrote belongs to no step
    return Engine(
        EngineParts(
            module=model, config=config, plan=plan, device=device, ledger=ledger, recorder=recorder, walk=walk, weights=weights,
            order=order, vertical=VerticalSchedule(walk, weights, order, recorder, device), randomness=randomness,
            updater=updater, optimizer=optimizer, lr_schedule=lr_schedule, persistence=persistence, activations=activations,
            num_micro_batches=config.batch(1).num_micro_batches, notes=(*config.notes(), *io_notes, *allocator_notes), resources=resources.pop_all(),
        )
    )  # fmt: skip


def _shares(unit: UnitPlan, layout: ShardLayout) -> ShardShares:
    return ShardShares(params=unit.params, grads=unit.grads, resident_tiles=unit.resident_tiles)


def _open_io(config: Config, plan: Plan, resources: ExitStack) -> tuple[IoEngine, tuple[str, ...]]:
    """Return the I/O engine that works in the directories, and what was not available there."""
    kind: str = config.infinity.engine if plan.uses_nvme else "threads"
    notes: list[str] = []
    for directory in config.nvme_directories if plan.uses_nvme else ():
        check_directory(directory)
        found = probe(directory, kind)
        kind = found.engine if kind == "auto" else kind
        notes += found.notes
    engine = open_engine(kind, queue_depth=config.aio.queue_depth, block_bytes=config.aio.block_size)
    resources.callback(engine.close)
    return engine, tuple(notes)


def _open_weight_slots(
    plan: Plan, layouts: Sequence[ShardLayout], ledger: Ledger, device: torch.device, pin: bool, resources: ExitStack
) -> list[Slot]:
    """Reserve the slots of gathered weights; where there are none, one page serves as staging for empty shards."""
    count = plan.num_weight_slots
    if count == 0:
        return [
            Slot(_arena(PAGE_BYTES, ledger, Owner.ROOT, pin, resources), torch.empty(0, dtype=torch.uint8, device=device))
        ]
    slot_bytes = plan.weight_slot_bytes if device.type == "cpu" else max(plan.weight_slot_bytes, plan.host_weight_slot_bytes)
    arena = _arena(count * slot_bytes, ledger, Owner.WEIGHT_SLOTS, pin, resources)
    return [_slot(arena.part(index * slot_bytes, slot_bytes), device) for index in range(count)]


def _arena(num_bytes: int, ledger: Ledger, owner: Owner, pin: bool, resources: ExitStack) -> Buffer:
    arena = open_arena(num_bytes, ledger=ledger, tier=Tier.CPU, owner=owner.value, pin=pin)
    resources.callback(arena.close)
    return arena.buffer


def _slot(host: Buffer, device: torch.device) -> Slot:
    flat = host.tensor(torch.uint8, host.num_bytes)
    return Slot(host, flat if device.type == "cpu" else torch.empty_like(flat, device=device))


def _kept_slot(store: Store, shard: Shard, device: torch.device) -> Slot:
    buffer = store.weights(shard.index)
    if buffer is None:
        raise IllegalTransition(f"Weights of {shard.layout.name} should be resident, but the store has none.")
    return _slot(buffer, device)


def _open_gradient_slots(plan: Plan, ledger: Ledger, pin: bool, resources: ExitStack) -> BufferPool | None:
    if plan.num_gradient_slots == 0:
        return None
    pool = open_pool(
        slot_bytes=plan.gradient_slot_bytes, num_slots=plan.num_gradient_slots, ledger=ledger, tier=Tier.CPU,
        owner=Owner.GRADIENT_SLOTS.value, pin=pin,
    )  # fmt: skip
    resources.callback(pool.close)
    return pool


def _fill(store: Store, pieces: CutModel, values: InitializedValues, slots: Sequence[Slot]) -> None:
    """Write the initial values of every group, with the slots in turn as staging."""
    written: list[Callable[[], None]] = []
    for number, (group, layout) in enumerate(zip(pieces.groups, pieces.layouts, strict=True)):
        if len(written) >= len(slots):
            written.pop(0)()
        written.append(fill_shard(store, group, layout, values, slots[number % len(slots)].host).wait)
    for wait in written:
        wait()


def _take_over(pieces: CutModel, plan: Plan, store: Store, device: torch.device) -> tuple[Shard, ...]:
    """Replace the model's own parameters: by views of the store's weights where they stay, by absent ones elsewhere."""
    shards = []
    for group, layout, unit in zip(pieces.groups, pieces.layouts, plan.units, strict=True):
        residency = _residency(group, layout, unit, plan)
        if residency is Residency.RESIDENT:
            outside = _resident_parameters(store, group, layout, device)
        else:
            outside = {spec.name: _absent(spec, layout.name, device) for spec in layout.specs}
        for use in group.uses:
            for place in use.places:
                place.module._parameters[place.attribute] = outside[use.name]
        shards.append(Shard(group, layout, residency, outside))
    return tuple(shards)


def _residency(group: ParameterGroup, layout: ShardLayout, unit: UnitPlan, plan: Plan) -> Residency:
    """Weights on the compute tier stay; they may be read at any time where nothing of their update is left for later."""
    if not group.units:
        return Residency.RESIDENT
    if unit.params is not plan.compute_tier:
        return Residency.ABSENT
    all_resident = unit.num_nvme_tiles == 0 and unit.grads is not Tier.NVME
    return Residency.RESIDENT if all_resident else Residency.KEPT


def _resident_parameters(
    store: Store, group: ParameterGroup, layout: ShardLayout, device: torch.device
) -> dict[str, nn.Parameter]:
    buffer = store.weights(layout.index)
    if buffer is None:
        raise IllegalTransition(f"Weights of {layout.name} should be resident, but the store has none.")
    flat = buffer.tensor(torch.uint8, buffer.num_bytes)
    views = Shard(group, layout, Residency.RESIDENT, {}).views(flat if device.type == "cpu" else flat.to(device))
    for use in group.uses:
        if use.parameter.is_meta:
            continue
        use.parameter.data = views[use.name]
    return {
        use.name: nn.Parameter(views[use.name], requires_grad=use.parameter.requires_grad)
        if use.parameter.is_meta
        else use.parameter
        for use in group.uses
    }


def _absent(spec: ParameterSpec, unit: str, device: torch.device) -> AbsentParameter:
    absent: AbsentParameter = AbsentParameter.standing_for(
        spec.name, unit, spec.shape, TORCH_DTYPES[spec.dtype], device, spec.trainable
    )
    return absent


def _build_walk(
    module: nn.Module, pieces: CutModel, shards: Sequence[Shard], plan: Plan, weights: Weights, sums: GradientSums, randomness: Randomness,
    device: torch.device, config: Config, activations: ActivationMeter,
) -> Walk:  # fmt: skip
    device_types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    runtimes = [
        UnitRuntime(
            unit, unit.module.forward, unit_bindings(unit, shards), weights, sums, randomness, device_types,
            config.infinity.check, activations.sample,
        )
        for unit in pieces.units
    ]  # fmt: skip
    absent = {shard.index for shard in shards if shard.residency is Residency.ABSENT}
    rerun = [config.infinity.recompute or bool(absent.intersection(unit.groups)) for unit in pieces.units]
    return Walk(module, runtimes, rerun, root_bindings(pieces.units, shards), weights, sums, randomness)


def _lr_schedule(config: Config, num_steps: int | None) -> LrSchedule:
    params = config.scheduler.params
    total = params.total_num_steps or num_steps or max(1, params.warmup_num_steps)
    schedule = build_schedule(
        config.scheduler.type, peak_lr=config.optimizer.params.lr, num_steps=max(total, params.warmup_num_steps),
        num_warmup_steps=params.warmup_num_steps,
    )  # fmt: skip
    return LrSchedule(schedule)


def _refuse_lease(shard: int) -> Lease:
    raise IllegalTransition(f"Shard {shard} was left with an update that nobody made.")
