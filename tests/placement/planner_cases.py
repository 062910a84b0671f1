"""Units and requests for the planner's tests: fixed ones, and hypothesis strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from infinity.byte_sizes import GIB, MIB, PAGE_BYTES, round_up
from infinity.placement import GradientReduction, Placement, PlanRequest, Schedule, UnitSize
from infinity.placement.contradictions import weights_off_the_compute_tier
from infinity.placement.stages import PARTITIONED

STATE_ELEMENT_BYTES = 10  # bf16: low half of the master, two moments
TILE_ELEMENTS = 8 * MIB // STATE_ELEMENT_BYTES // 4096 * 4096


def unit_size(
    name: str,
    num_elements: int,
    *,
    tile_elements: int = TILE_ELEMENTS,
    visits: int = 1,
    kept_bytes: int = 0,
    is_root: bool = False,
) -> UnitSize:
    """A bf16 unit with one trainable parameter and one bias."""
    lengths = [min(tile_elements, num_elements - start) for start in range(0, num_elements, tile_elements)]
    weight_bytes = round_up(2 * num_elements, PAGE_BYTES)
    return UnitSize(
        name=name,
        parameter_names=(f"{name}.weight", f"{name}.bias"),
        weight_bytes=weight_bytes,
        gathered_weight_bytes=weight_bytes,
        num_state_elements=num_elements,
        num_waiting_elements=num_elements,
        num_gradient_elements=num_elements,
        tile_bytes=tuple(round_up(length * STATE_ELEMENT_BYTES, PAGE_BYTES) for length in lengths),
        visits=visits,
        kept_bytes=kept_bytes,
        is_root=is_root,
    )


def split_units(units: Sequence[UnitSize], stage: int, num_ranks: int) -> tuple[UnitSize, ...]:
    """Whole bf16 units as one of several ranks has them at a stage, by the definition of the stages."""

    def split(unit: UnitSize) -> UnitSize:
        part = round_up(-(-unit.num_gradient_elements // num_ranks), 64)
        owned = part if stage > 0 else part * num_ranks
        tile_elements = TILE_ELEMENTS if unit.num_tiles < 2 else unit.tile_bytes[0] // STATE_ELEMENT_BYTES
        lengths = [min(tile_elements, owned - start) for start in range(0, owned, tile_elements)]
        return replace(
            unit,
            weight_bytes=round_up(2 * owned, PAGE_BYTES),
            gathered_weight_bytes=round_up(2 * part * num_ranks, PAGE_BYTES),
            num_state_elements=owned,
            num_waiting_elements=owned,
            num_gradient_elements=part * num_ranks,
            tile_bytes=tuple(round_up(length * STATE_ELEMENT_BYTES, PAGE_BYTES) for length in lengths),
            is_split=stage > 0,
            gathers_weights=stage == 3 and not unit.is_root,
            gather_bytes=2 * part * num_ranks,
        )

    return tuple(split(unit) for unit in units) if num_ranks > 1 else tuple(units)


def decoder_400m() -> tuple[UnitSize, ...]:
    """403 M parameters as in a byte-level decoder of 24 blocks: embedding, blocks, head, and a root of one norm."""
    blocks = [unit_size(f"blocks.{index}", 16_780_000 // 64 * 64) for index in range(24)]
    return (unit_size("embed", 257 * 1024), *blocks, unit_size("head", 257 * 1024), unit_size("root", 1024, is_root=True))


def request_400m(cpu_memory_bytes: int = GIB, placement: Placement | None = None, **changes: object) -> PlanRequest:
    """The 403 M decoder in bf16 with four micro-batches on a machine without a GPU."""
    values: dict[str, object] = {
        "units": decoder_400m(),
        "placement": placement or Placement(),
        "cpu_memory_bytes": cpu_memory_bytes,
        "gpu_memory_bytes": None,
        "num_micro_batches": 4,
        "activation_bytes": 64 * MIB,
        "grad_element_bytes": 2,
        "tile_elements": TILE_ELEMENTS,
    }
    return PlanRequest(**(values | changes))  # type: ignore[arg-type]


@st.composite
def unit_lists(draw: st.DrawFn) -> tuple[UnitSize, ...]:
    """A few units of very different sizes, some called twice, some with kept activations, sometimes a root."""
    num_units = draw(st.integers(1, 5))
    units = [
        unit_size(
            f"u{index}",
            64 * draw(st.integers(1, 3000)),
            tile_elements=8192,
            visits=draw(st.sampled_from([1, 1, 1, 2])),
            kept_bytes=draw(st.sampled_from([0, 0, 5000, 300_000])),
        )
        for index in range(num_units)
    ]
    if draw(st.booleans()):
        units.append(unit_size("root", 64 * draw(st.integers(1, 100)), tile_elements=8192, is_root=True))
    return tuple(units)


TIER_WORDS = ["auto", "gpu", "cpu", "nvme"]
OPTIM_WORDS = [*TIER_WORDS, {"cpu": 0.5, "nvme": 0.5}, {"gpu": 0.25, "cpu": 0.25, "nvme": 0.5}]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Anything that may be asked for all units, and something else for the first."""
    placement = Placement()
    for pattern in ("*", "u0"):
        if draw(st.booleans()):
            placement = placement.override(
                pattern,
                optim=draw(st.sampled_from(OPTIM_WORDS)),
                params=draw(st.sampled_from(TIER_WORDS)),
                grads=draw(st.sampled_from(TIER_WORDS)),
            )
    return placement


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """A request of one rank, among up to three, with a budget of 4 MiB; tests replace it."""
    num_ranks, stage = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from(list(PARTITIONED)))
    request = PlanRequest(
        units=split_units(draw(unit_lists()), stage, num_ranks),
        placement=replace(draw(placements()), stage=stage),
        cpu_memory_bytes=4 * MIB,
        gpu_memory_bytes=draw(st.sampled_from([None, None, None, 2 * MIB, 16 * MIB])),
        num_micro_batches=draw(st.sampled_from([1, 4])),
        activation_bytes=draw(st.sampled_from([0, 100_000])),
        grad_element_bytes=draw(st.sampled_from([2, 4])),
        tile_elements=8192,
        max_tile_slots=draw(st.sampled_from([3, 5])),
        num_weight_slots=draw(st.sampled_from([2, 3])),
        schedule=draw(st.sampled_from(list(Schedule))),
        recompute=draw(st.booleans()),
        root_bytes=draw(st.sampled_from([0, 70_000])),
        num_ranks=num_ranks,
        gradient_reduction=draw(st.sampled_from([None, *GradientReduction])),
        scratch_bytes=50_000 * (num_ranks - 1),
    )
    assume(weights_off_the_compute_tier(request) is None)
    return request
