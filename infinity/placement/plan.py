"""The plan: frozen values that say where every byte lives and how many cross to NVMe; the allocators execute it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from infinity.byte_sizes import format_bytes
from infinity.placement.stages import is_partitioned
from infinity.states import StateKind, Tier


class Owner(str, Enum):
    """Who holds memory; the ledger's owners have these names."""

    WEIGHTS = "weights"
    WEIGHT_SLOTS = "weight slots"
    GRADIENTS = "gradients"
    GRADIENT_SLOTS = "gradient slots"
    ACCUMULATORS = "gradient accumulators"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer state"
    TILE_SLOTS = "tile slots"
    ACTIVATIONS = "activations"
    ROOT = "root"
    RULE_STATE = "state of torch's optimizer"
    RULE_GRADIENTS = "fp32 gradients of torch's optimizer"


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The peak of one owner in one tier; `counts` says what is counted."""

    tier: Tier
    owner: Owner
    num_bytes: int
    counts: str


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """NVMe bytes of one model state in one step. `formula_read_bytes` counts every load of a weight as a read;
    `read_bytes` leaves out the loads whose weights are still in a slot."""

    what: str
    read_bytes: int
    write_bytes: int
    formula_read_bytes: int


class Link(str, Enum):
    """What connects the places where bytes live, beside NVMe."""

    RANKS = "between ranks"
    TO_GPU = "host to GPU"
    TO_HOST = "GPU to host"


@dataclass(frozen=True, slots=True)
class LinkLine:
    """Bytes of one rank over a link in one step; between ranks as many come in as go out.

    `num_bytes` is the theory's; `bytes_in_slots` of it are not moved, for they are still in a slot.
    """

    link: Link
    what: str
    num_bytes: int
    bytes_in_slots: int = 0

    @property
    def expected_bytes(self) -> int:
        """What is expected to be measured."""
        return self.num_bytes - self.bytes_in_slots


@dataclass(frozen=True, slots=True)
class DiskLine:
    """Bytes that one model state takes on NVMe."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DirectoryLine:
    """Bytes that one directory takes; what its device did when it was measured, which directories on one device share."""

    directory: str
    device: str
    num_bytes: int
    read_bytes_per_second: float | None = None  # None: not measured
    write_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Where one unit's states live."""

    name: str
    params: Tier
    grads: Tier  # where its gradient, or its fp32 sums in horizontal order, waits for the update; never the GPU
    num_sums: int  # fp32 sums that wait there between micro-batches; 0 where none do
    num_sum_elements: int  # of one of them: the whole unit's, or this rank's part where each micro-batch is reduced
    num_tiles: int
    cpu_tiles: tuple[int, ...]  # tiles of optimizer state that stay in RAM, ascending
    reruns: bool  # forward is rerun in backward

    @property
    def resident_tiles(self) -> frozenset[int]:
        return frozenset(self.cpu_tiles)

    @property
    def num_nvme_tiles(self) -> int:
        return self.num_tiles - len(self.cpu_tiles)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first allocation."""

    units: tuple[UnitPlan, ...]  # in forward order
    compute_tier: Tier
    stage: int
    num_ranks: int
    gradient_reduction: str  # "boundary": once a step; "micro_batch": each, into sums of this rank's part
    reduction_bytes: int  # of the buffers on the compute tier in which gradients are summed over ranks; 0 for one rank
    num_weight_slots: int  # buffers for gathered units on the compute tier; 0 where all weights are resident there
    weight_slot_bytes: int
    num_host_weight_slots: int  # staging in RAM, where there is a GPU and weights are on NVMe
    host_weight_slot_bytes: int
    num_tile_slots: int  # 0 where no tile is on NVMe
    tile_slot_bytes: int
    num_gradient_slots: int  # 0 where no gradient is on NVMe
    gradient_slot_bytes: int
    tile_gradient_bytes: int  # for each tile in flight, where a gradient is on NVMe
    memory: tuple[MemoryLine, ...]
    traffic: tuple[TrafficLine, ...]
    links: tuple[LinkLine, ...]
    disk: tuple[DiskLine, ...]
    budgets: tuple[tuple[Tier, int], ...]
    stage_reason: str = ""  # why this stage, where nobody asked for one
    directories: tuple[DirectoryLine, ...] = ()  # how the bytes on NVMe are shared out; empty until somebody has looked

    def memory_bytes(self, tier: Tier) -> int:
        """Return the predicted peak of a tier."""
        return sum(line.num_bytes for line in self.memory if line.tier is tier)

    def owner_bytes(self, owner: Owner) -> int:
        """Return the predicted peak of an owner over all tiers."""
        return sum(line.num_bytes for line in self.memory if line.owner is owner)

    @property
    def nvme_read_bytes(self) -> int:
        """Bytes read in one step, as they are expected to be measured."""
        return sum(line.read_bytes for line in self.traffic)

    @property
    def nvme_formula_read_bytes(self) -> int:
        """Bytes read in one step when every load of a weight is a read (V_r)."""
        return sum(line.formula_read_bytes for line in self.traffic)

    @property
    def nvme_write_bytes(self) -> int:
        """Bytes written in one step (V_w)."""
        return sum(line.write_bytes for line in self.traffic)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the swap files take."""
        return sum(line.num_bytes for line in self.disk)

    @property
    def uses_nvme(self) -> bool:
        return self.disk_bytes > 0

    @property
    def nvme_seconds(self) -> float | None:
        """The time of one step's reads and writes at the measured rates, one direction at a time; None where unmeasured."""
        total = sum(line.num_bytes for line in self.directories)
        seconds: dict[str, float] = {}  # by device
        for line in self.directories:
            if line.read_bytes_per_second is None or line.write_bytes_per_second is None:
                return None
            reading = self.nvme_read_bytes / line.read_bytes_per_second
            writing = self.nvme_write_bytes / line.write_bytes_per_second
            seconds[line.device] = seconds.get(line.device, 0.0) + line.num_bytes / total * (reading + writing)
        return max(seconds.values(), default=None)

    @property
    def nvme_bytes_per_second(self) -> float | None:
        """What the directories do together with one step's mix of reads and writes; None where unmeasured."""
        return (self.nvme_read_bytes + self.nvme_write_bytes) / self.nvme_seconds if self.nvme_seconds else None

    def to_json(self) -> dict[str, object]:
        """Return plain values, with the totals, ready for json.dumps."""
        totals = {
            "memory_bytes": {tier.value: self.memory_bytes(tier) for tier, _ in self.budgets},
            "nvme_read_bytes": self.nvme_read_bytes,
            "nvme_formula_read_bytes": self.nvme_formula_read_bytes,
            "nvme_write_bytes": self.nvme_write_bytes,
            "disk_bytes": self.disk_bytes,
        }
        plain = _plain(asdict(self))
        return {**totals, **plain} if isinstance(plain, dict) else totals

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Return (label, value) rows to print."""
        rows = [("zero stage", _stage_words(self)), ("units", _tier_counts(self.units))]
        num_tiles = sum(unit.num_tiles for unit in self.units)
        num_resident = sum(len(unit.resident_tiles) for unit in self.units)
        rows.append(("optimizer tiles resident", f"{num_resident} of {num_tiles}"))
        rows += [
            (f"{line.tier.value} {line.owner.value}", f"{format_bytes(line.num_bytes)}: {line.counts}")
            for line in self.memory
        ]
        rows += [
            (f"{tier.value} memory peak", f"{format_bytes(self.memory_bytes(tier))} of {format_bytes(budget)}")
            for tier, budget in self.budgets
        ]
        rows += [(f"nvme {line.what}", format_bytes(line.num_bytes)) for line in self.disk]
        rows.append(("nvme total", format_bytes(self.disk_bytes)))
        rows += [(f"nvme {line.directory}", _directory_words(line, self.directories)) for line in self.directories]
        rows += [
            (f"nvme {line.what} per step", f"read {format_bytes(line.read_bytes)}, written {format_bytes(line.write_bytes)}")
            for line in self.traffic
        ]
        saved = self.nvme_formula_read_bytes - self.nvme_read_bytes
        hits = f" ({format_bytes(saved)} of weights found in slots at the turn)" if saved else ""
        rows.append(("nvme read per step", format_bytes(self.nvme_read_bytes) + hits))
        rows.append(("nvme written per step", format_bytes(self.nvme_write_bytes)))
        rows += [(f"{line.link.value} per step", _link_words(line)) for line in self.links]
        if self.nvme_seconds is not None:
            rows.append(("nvme time per step", f"{self.nvme_seconds:.2f} s at the measured rates"))
        return tuple(rows)


_KIND_WORDS = {StateKind.OPTIM: "optimizer state", StateKind.GRAD: "gradients", StateKind.PARAM: "weights"}
_REDUCTION_WORDS = {"boundary": "gradients are reduced once a step", "micro_batch": "each micro-batch is reduced"}


def _stage_words(plan: Plan) -> str:
    if plan.num_ranks == 1:
        return f"{plan.stage}, which changes nothing on one rank"
    kinds = [words for kind, words in _KIND_WORDS.items() if is_partitioned(plan.stage, kind)]
    split = f"{', '.join(kinds)} partitioned" if kinds else "nothing partitioned"
    why = f". {plan.stage_reason}" if plan.stage_reason else ""
    return f"{plan.stage} on {plan.num_ranks} ranks: {split}; {_REDUCTION_WORDS[plan.gradient_reduction]}{why}"


def _tier_counts(units: tuple[UnitPlan, ...]) -> str:
    words = []
    for label, tiers in (("weights", [unit.params for unit in units]), ("gradients", [unit.grads for unit in units])):
        counts = [f"{tiers.count(tier)} {tier.value}" for tier in Tier if tier in tiers]
        words.append(f"{label} {' + '.join(counts)}")
    return f"{len(units)}; {', '.join(words)}"


def _link_words(line: LinkLine) -> str:
    hits = f" ({format_bytes(line.bytes_in_slots)} more are found in slots at the turn)" if line.bytes_in_slots else ""
    return f"{format_bytes(line.expected_bytes)} of {line.what}{hits}"


def _directory_words(line: DirectoryLine, lines: tuple[DirectoryLine, ...]) -> str:
    share = line.num_bytes / max(1, sum(one.num_bytes for one in lines))
    words = f"{format_bytes(line.num_bytes)} ({share:.0%}) on {line.device}"
    if line.read_bytes_per_second is None or line.write_bytes_per_second is None:
        return words
    shared = ", shared" if sum(one.device == line.device for one in lines) > 1 else ""
    read, written = format_bytes(line.read_bytes_per_second), format_bytes(line.write_bytes_per_second)
    return f"{words}: reads {read}/s, writes {written}/s{shared}"


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
