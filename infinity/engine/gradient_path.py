"""Puts together the way of gradients: sums over micro-batches, over ranks, and the place where they wait for the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from infinity.comm.group import Group
from infinity.engine.agreement import Agreement
from infinity.engine.cut import CutModel
from infinity.engine.reserve import open_device_gradient, open_reduction_buffers
from infinity.engine.spread import GradientSpread
from infinity.engine.waiting_gradients import WaitingGradients
from infinity.engine.waiting_sums import PublishTotal, WaitingSums
from infinity.memory.device import ComputeDevice
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, Lease
from infinity.optim.kernel import AdamKernel
from infinity.placement import GradientReduction, Plan
from infinity.placement.request import reduction_of_sums
from infinity.store.layout import ELEMENT_BYTES
from infinity.store.store import Store
from infinity.zero.gradients import FinalRun, GradientSums
from infinity.zero.reduction import PartSums, RankReduction
from infinity.zero.shard import TORCH_DTYPES, Shard
from infinity.zero.turns import first_turns


@dataclass(frozen=True, slots=True)
class GradientPath:
    """What the engine needs of it."""

    sums: GradientSums
    waiting: WaitingGradients
    reduction: RankReduction | None  # None: one rank
    agreement: Agreement


def open_gradient_path(
    *,
    group: Group,
    store: Store,
    pieces: CutModel,
    plan: Plan,
    shards: Sequence[Shard],
    slots: BufferPool | None,
    kernel: AdamKernel,
    grad_dtype: str,
    sent_dtype: str,
    asked_reduction: GradientReduction | None,
    update_now: Callable[[Sequence[int]], None],
    compute: ComputeDevice,
    ledger: Ledger,
    resources: ExitStack,
) -> GradientPath:
    """Reserve what the plan names for it; `resources` gives everything back."""
    layouts, is_one_rank = pieces.unit_layouts, group.size == 1
    is_split = any(one.is_split for one in layouts)
    buffers = None
    if not is_one_rank:
        buffers = open_reduction_buffers(
            plan, pieces, TORCH_DTYPES[sent_dtype], TORCH_DTYPES[grad_dtype], compute, ledger, resources
        )
    waiting = WaitingGradients(
        store=store,
        layouts=layouts,
        spread=None if buffers is None or is_split else GradientSpread(group, layouts, buffers.part),
        slots=slots,
        kernel=kernel,
        grad_dtype=grad_dtype,
        update_now=update_now,
        transfers=compute.transfers,
        on_device=open_device_gradient(pieces, compute, ELEMENT_BYTES[grad_dtype], ledger, resources),
    )
    turns = None if is_one_rank else first_turns(shards)
    # Not the plan's: the familiar loop runs backward one by one under a plan for vertical order, too.
    reduction_of = reduction_of_sums(asked_reduction, stage=plan.stage, num_ranks=group.size)
    by_micro_batch = reduction_of is GradientReduction.MICRO_BATCH
    reductions: list[RankReduction] = []

    def publish_whole(shard: int, total: torch.Tensor, touched: frozenset[str], lease: Lease | None) -> None:
        reductions[0].publish(shard, (FinalRun(0, total),), touched)
        if lease is not None:
            lease.release()

    publish: PublishTotal = waiting.publish_sum if is_one_rank or by_micro_batch else publish_whole
    waiting_sums = WaitingSums(
        store=store,
        layouts=[one.part if by_micro_batch else one.whole for one in layouts],
        num_sums={unit.index: planned.num_sums for unit, planned in zip(pieces.layouts, plan.units, strict=True)},
        slots=slots,
        publish=publish,
        update_now=update_now,
        ledger=ledger,
    )
    resources.callback(waiting_sums.close)
    agreement = Agreement(group, layouts, turns)
    if buffers is None:
        return GradientPath(GradientSums(shards, waiting, waiting_sums), waiting, None, agreement)
    part_sums = PartSums(waiting_sums) if by_micro_batch else None
    reductions.append(RankReduction(group=group, layouts=layouts, flat=buffers.flat, target=waiting, part_sums=part_sums))
    sums = GradientSums(shards, reductions[0], waiting_sums, turns)
    return GradientPath(sums, waiting, reductions[0], agreement)
