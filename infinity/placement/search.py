"""The search for the best plan: of a fixed family of candidates, the one that fits and has the fewest NVMe bytes.

The family does not depend on the budget. So more budget never gives more NVMe bytes, and the smallest workable budget is the
smallest peak of any member. A member says how many steps of each of two orders are taken:

- moves: weights of undecided units into RAM, then their gradients, each in forward order (weights in RAM save two reads, a
  write and a rerun; the last units are found in their slots at the turn anyway, so they come last);
- tiles: undecided tiles of optimizer state into RAM, spread evenly over the units.

Fewer tile slots than wanted are used only where nothing else is moved. Where there is a GPU, weights that came into RAM go
on to it as far as they fit: they keep their place in RAM, so that costs none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from infinity.placement.draft import Draft, draft_unit, spread_order
from infinity.placement.estimate import disk_lines, memory_lines, tier_bytes, traffic_lines
from infinity.placement.plan import MemoryLine, Owner
from infinity.placement.request import PlanRequest
from infinity.states import Tier


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member of the family and what it costs."""

    drafts: tuple[Draft, ...]
    num_tiles: int  # undecided tiles that become resident, in the order of `free_tiles`
    num_tile_slots: int
    cpu_bytes: int
    traffic_bytes: int


def decided(request: PlanRequest) -> tuple[Draft, ...]:
    """Return the units with what the placement decides."""
    asked = request.placement.resolve(request.units)
    return tuple(draft_unit(unit, choice, request) for unit, choice in zip(request.units, asked, strict=True))


def fits_gpu(request: PlanRequest, drafts: tuple[Draft, ...]) -> bool:
    """Return whether the GPU, where there is one, has room with only the weights there that must be."""
    return request.gpu_memory_bytes is None or _gpu_bytes(request, drafts) <= request.gpu_memory_bytes


def smallest_gpu_bytes(request: PlanRequest) -> int:
    """Return the GPU peak with only the weights there that must be."""
    return _gpu_bytes(request, decided(request))


def candidates(request: PlanRequest, drafts: tuple[Draft, ...], budget_bytes: int | None) -> Iterator[Candidate]:
    """Yield the members that can be the best within the budget; without a budget, those that can have the smallest peak."""
    sizes = [drafts[number].unit.tile_bytes[tile] for number, tile in free_tiles(drafts)]
    totals = [0, *accumulate(sizes)]
    for num_moves, in_ram in enumerate(_moved(drafts)):
        moved = _on_gpu(request, drafts, in_ram)
        fewest_slots = request.max_tile_slots if num_moves else request.min_tile_slots
        for num_tile_slots in range(fewest_slots, request.max_tile_slots + 1):
            for candidate in _with_tiles(request, moved, totals, num_tile_slots, budget_bytes):
                if budget_bytes is None or candidate.cpu_bytes <= budget_bytes:
                    yield candidate


def free_tiles(drafts: Sequence[Draft]) -> list[tuple[int, int]]:
    """Return (unit, tile) of the undecided tiles in the order in which they become resident."""
    ranked = []
    for number, draft in enumerate(drafts):
        if draft.has_free_tiles:
            order = spread_order(draft.unit.num_tiles)
            ranked += [(rank / len(order), number, tile) for rank, tile in enumerate(order)]
    return [(number, tile) for _, number, tile in sorted(ranked)]


def _with_tiles(
    request: PlanRequest, drafts: tuple[Draft, ...], totals: list[int], num_tile_slots: int, budget_bytes: int | None
) -> Iterator[Candidate]:
    lines = memory_lines(request, drafts, num_tile_slots=num_tile_slots)
    cpu_bytes = tier_bytes(lines, Tier.CPU)
    traffic_bytes = sum(line.read_bytes + line.write_bytes for line in traffic_lines(request, drafts))
    disk_bytes, disk_limit = sum(line.num_bytes for line in disk_lines(drafts)), request.disk_limit_bytes
    fewest = 0 if disk_limit is None else bisect_left(totals, disk_bytes - disk_limit)
    all_tiles = len(totals) - 1
    counts = {fewest, all_tiles}
    if budget_bytes is not None and num_tile_slots == request.max_tile_slots:
        counts.add(bisect_right(totals, budget_bytes - cpu_bytes) - 1)
    slots_go_with_the_last = not any(draft.has_nvme_tiles and not draft.has_free_tiles for draft in drafts)
    for num_tiles in counts:
        if fewest <= num_tiles <= all_tiles:
            without_slots = num_tiles == all_tiles and slots_go_with_the_last
            yield Candidate(
                drafts=drafts,
                num_tiles=num_tiles,
                num_tile_slots=num_tile_slots,
                cpu_bytes=cpu_bytes + totals[num_tiles] - (_tile_slots_bytes(lines) if without_slots else 0),
                traffic_bytes=traffic_bytes - 2 * totals[num_tiles],
            )


def _tile_slots_bytes(lines: Sequence[MemoryLine]) -> int:
    return sum(line.num_bytes for line in lines if line.owner is Owner.TILE_SLOTS)


def _moved(drafts: tuple[Draft, ...]) -> Iterator[tuple[Draft, ...]]:
    """Yield the drafts after 0, 1, 2 ... moves into RAM."""
    current = list(drafts)
    yield tuple(current)
    for number, draft in enumerate(current):
        if draft.params is None:
            current[number] = replace(draft, params=Tier.CPU)
            yield tuple(current)
    for number, draft in enumerate(current):
        if draft.grads is None:
            current[number] = replace(draft, grads=Tier.CPU)
            yield tuple(current)


def _on_gpu(request: PlanRequest, drafts: tuple[Draft, ...], in_ram: tuple[Draft, ...]) -> tuple[Draft, ...]:
    """Return `in_ram` with as many of the weights that `drafts` left undecided on the GPU as fit there, in forward order."""
    budget_bytes = request.gpu_memory_bytes
    if budget_bytes is None:
        return in_ram
    free = [
        n
        for n, draft in enumerate(drafts)
        if draft.params is None and in_ram[n].params is Tier.CPU and not draft.unit.gathers_weights
    ]

    def state(num_units: int) -> tuple[Draft, ...]:
        chosen = frozenset(free[:num_units])
        return tuple(replace(draft, params=Tier.GPU) if n in chosen else draft for n, draft in enumerate(in_ram))

    whole = state(len(free))
    if _gpu_bytes(request, whole) <= budget_bytes:  # the last one may make the slots unnecessary
        return whole
    counts = range(len(free) + 1)
    return state(max(0, bisect_right(counts, budget_bytes, key=lambda count: _gpu_bytes(request, state(count))) - 1))


def _gpu_bytes(request: PlanRequest, drafts: tuple[Draft, ...]) -> int:
    return tier_bytes(memory_lines(request, drafts, num_tile_slots=request.min_tile_slots), Tier.GPU)
