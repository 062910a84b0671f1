"""What training would take, stage by stage, of a machine that need not be there: bytes and plans; torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from infinity.comm.buckets import scratch_bytes
from infinity.config.own import InfinitySection
from infinity.errors import ConfigError, DoesNotFit, InfinityError
from infinity.models.presets import block_kept_bytes
from infinity.models.shapes import ModelShape, UnitShape
from infinity.placement import (
    LinkLine,
    Placement,
    Plan,
    PlanRequest,
    Schedule,
    StageChoice,
    StateBytes,
    UnitSize,
    choose_stage,
    plan_with_slots,
    state_bytes,
    textbook_bytes,
)
from infinity.placement.contradictions import weights_off_the_compute_tier
from infinity.placement.links import collective_lines
from infinity.placement.stages import PARTITIONED
from infinity.states import StateKind
from infinity.store.layout import ELEMENT_BYTES, STATE_PLANES, ParameterSpec
from infinity.store.unit_size import tile_elements_of, unit_layouts, unit_size
from infinity.train.activation_budget import activation_budget_bytes

STAGES = tuple(PARTITIONED)
# The dtype of the weights by the user's word for it; a finished gradient has the same.
_DTYPES = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
PRECISIONS = tuple(word for word, dtype in _DTYPES.items() if dtype in STATE_PLANES)


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a machine, and the shape of a step. Memory and disk are the whole machine's, GPU memory is one GPU's."""

    shape: ModelShape
    precision: str
    num_ranks: int
    stages: tuple[int, ...]
    placement: Placement
    micro_batch_size: int
    num_micro_batches: int
    seq_len: int
    schedule: Schedule
    has_gpu: bool
    gpu_memory_bytes: int | None  # None: unknown, so that there is no plan where `has_gpu`
    cpu_memory_bytes: int
    nvme_bytes: int | None  # None: there is no NVMe


@dataclass(frozen=True, slots=True)
class StageOutlook:
    """One stage on one rank."""

    stage: int
    textbook: StateBytes
    own: StateBytes  # the same states as infinity stores them, without padding and buffers
    plan: Plan | None
    why_no_plan: str
    remedy: str
    links: tuple[LinkLine, ...]  # beside NVMe, which is in the plan


@dataclass(frozen=True, slots=True)
class Outlook:
    """The answer."""

    question: Question
    stages: tuple[StageOutlook, ...]
    choice: StageChoice | None  # None: nothing fits, or too little is known

    @property
    def chosen(self) -> StageOutlook | None:
        by_number = {one.stage: one for one in self.stages}
        return None if self.choice is None else by_number[self.choice.stage]

    def to_json(self) -> dict[str, object]:
        """Return plain values, ready for json.dumps; bytes are those of one rank."""
        question, shape = self.question, self.question.shape
        return {
            "model": shape.name,
            "num_parameters": shape.num_parameters,
            "note": shape.note,
            "precision": question.precision,
            "num_ranks": question.num_ranks,
            "bytes_per_parameter": {kind.value: size for kind, size in element_bytes(question.precision).items()},
            "stages": [_stage_json(one) for one in self.stages],
            "chosen_stage": None if self.choice is None else self.choice.stage,
            "reason": "" if self.choice is None else self.choice.reason,
        }


def look_ahead(question: Question) -> Outlook:
    """Return what each stage takes, which plan it would get, and which one would be chosen.

    Raises ConfigError for a precision that is not known and for a placement that contradicts the machine.
    """
    stages = tuple(_look_at(question, stage) for stage in question.stages)
    plans = {one.stage: one.plan for one in stages if one.plan is not None}
    return Outlook(question, stages, choose_stage(plans, set(question.stages) - set(plans)))


def element_bytes(precision: str) -> dict[StateKind, int]:
    """Return what infinity stores of each model state, in bytes per parameter."""
    dtype = _dtype_of(precision)
    optimizer = sum(plane.element_bytes for plane in STATE_PLANES[dtype])
    return {StateKind.PARAM: ELEMENT_BYTES[dtype], StateKind.GRAD: ELEMENT_BYTES[dtype], StateKind.OPTIM: optimizer}


def _look_at(question: Question, stage: int) -> StageOutlook:
    num_parameters, num_ranks = question.shape.num_parameters, question.num_ranks
    request = _request(question, stage)
    plan, refused = _plan(question, request)
    return StageOutlook(
        stage=stage,
        textbook=textbook_bytes(num_parameters, stage, num_ranks),
        own=state_bytes(num_parameters, stage, num_ranks, element_bytes(question.precision)),
        plan=plan,
        why_no_plan=refused.message,
        remedy=refused.remedy,
        links=collective_lines(request) if plan is None else plan.links,
    )


def _plan(question: Question, request: PlanRequest) -> tuple[Plan | None, InfinityError]:
    """Return the plan, or why there is none."""
    nothing = DoesNotFit("")
    if (misplaced := weights_off_the_compute_tier(request)) is not None:
        return None, misplaced
    if question.has_gpu and question.gpu_memory_bytes is None:
        return None, DoesNotFit("The memory of a GPU is not given.", remedy="Give --gpu-memory SIZE for a plan.")
    try:
        return plan_with_slots(request), nothing
    except DoesNotFit as error:
        return None, error


def _request(question: Question, stage: int) -> PlanRequest:
    dtype, decoder = _dtype_of(question.precision), question.shape.decoder
    return PlanRequest(
        units=sizes_of(question, stage),
        placement=replace(question.placement, stage=stage),
        cpu_memory_bytes=question.cpu_memory_bytes // question.num_ranks,
        gpu_memory_bytes=(question.gpu_memory_bytes or 0) if question.has_gpu else None,
        num_micro_batches=question.num_micro_batches,
        activation_bytes=activation_budget_bytes(
            decoder,
            micro_batch_size=question.micro_batch_size,
            seq_len=question.seq_len,
            num_micro_batches=question.num_micro_batches,
            schedule=question.schedule,
            dtype_bytes=ELEMENT_BYTES[dtype],
        ),
        grad_element_bytes=ELEMENT_BYTES[dtype],
        tile_elements=_tile_elements(dtype),
        schedule=question.schedule,
        has_nvme=question.nvme_bytes is not None,
        nvme_free_bytes=None if question.nvme_bytes is None else question.nvme_bytes // question.num_ranks,
        num_local_ranks=question.num_ranks,
        num_ranks=question.num_ranks,
        scratch_bytes=0 if question.has_gpu else scratch_bytes(question.num_ranks),
    )


def sizes_of(question: Question, stage: int) -> tuple[UnitSize, ...]:
    """Return the units as one rank sees them at a stage. The blocks of a model are alike, so one of a kind is laid out."""
    dtype = _dtype_of(question.precision)
    tile_elements = _tile_elements(dtype)
    kept = block_kept_bytes(
        question.shape.decoder,
        micro_batch_size=question.micro_batch_size,
        seq_len=question.seq_len,
        dtype_bytes=ELEMENT_BYTES[dtype],
    )
    known: dict[tuple[tuple[int, ...], ...], UnitSize] = {}

    def size_of(unit: UnitShape) -> UnitSize:
        shapes = tuple(shape for _, shape in unit.parameters)
        key = (*shapes, (unit.visits, unit.is_block, unit.is_root))
        if key not in known:
            specs = [ParameterSpec(name, shape, dtype, trainable=True) for name, shape in unit.parameters]
            layouts = unit_layouts(
                0,
                unit.name,
                specs,
                tile_elements=tile_elements,
                stage=stage,
                num_ranks=question.num_ranks,
                is_root=unit.is_root,
            )
            kept_bytes = kept if unit.is_block else 0
            known[key] = unit_size(layouts, visits=unit.visits, kept_bytes=kept_bytes, is_root=unit.is_root)
        return replace(known[key], name=unit.name, parameter_names=tuple(name for name, _ in unit.parameters))

    return tuple(size_of(unit) for unit in question.shape.units)


def _tile_elements(dtype: str) -> int:
    return tile_elements_of(InfinitySection().tile_bytes, dtype)


def _dtype_of(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ConfigError(f"--precision: {precision!r} is not known.", remedy=f"Known: {', '.join(PRECISIONS)}.")
    return _DTYPES[precision]


def _plan_json(plan: Plan) -> dict[str, object]:
    """Return the plan with the number of resident tiles instead of their list, which is long."""
    units = [{**asdict(unit), "cpu_tiles": len(unit.cpu_tiles)} for unit in plan.units]
    return {**plan.to_json(), "units": units}


def _stage_json(one: StageOutlook) -> dict[str, object]:
    links = [{"link": line.link.value, "what": line.what, "num_bytes": line.num_bytes} for line in one.links]
    return {
        "stage": one.stage,
        "textbook_bytes": {**asdict(one.textbook), "total": one.textbook.total},
        "state_bytes": {**asdict(one.own), "total": one.own.total},
        "fits": one.plan is not None,
        "why_no_plan": one.why_no_plan,
        "remedy": one.remedy,
        "links_bytes_per_step": links,
        "plan": None if one.plan is None else _plan_json(one.plan),
    }
