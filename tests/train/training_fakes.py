"""An engine that trains one number, and a reporter that remembers, for the tests of the training loop."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.checkpoint.manifest import CheckpointState, Counters, Fingerprint
from infinity.checkpoint.reader import open_checkpoint
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.writer import write_checkpoint
from infinity.comm.group import Group
from infinity.comm.local import Local
from infinity.comm.open_group import Rendezvous, open_group
from infinity.comm.watch import Pace
from infinity.config import Layer
from infinity.engine.results import IoFacts
from infinity.memory.ledger import Ledger
from infinity.models.gpt import build_meta_gpt
from infinity.models.presets import preset
from infinity.placement.plan import Link, LinkLine
from infinity.states import Tier
from infinity.telemetry.recorder import Recorder
from infinity.train.options import TrainOptions, resolve_config
from infinity.train.preflight import Checked
from infinity.train.reporter import Progress, Reporter, Row, StepRecord

STATE = TensorSpec("weight/state", "float64", ())


@dataclass
class Remembering:
    """A reporter that keeps what it was told."""

    notes: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def plan(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)

    def phase(self, text: str) -> None:
        pass

    def step(self, record: StepRecord, progress: Progress) -> None:
        self.records.append(record)

    def summary(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)


class FakePlan:
    """A plan that says only that it is none."""

    nvme_bytes_per_second = None
    uses_nvme = False
    links = (LinkLine(Link.RANKS, "weights gathered", 60, bytes_in_slots=10), LinkLine(Link.TO_GPU, "weights", 7))
    stage = 1
    gradient_reduction = "boundary"

    def to_json(self) -> dict[str, object]:
        return {"fake": True}


@dataclass(frozen=True)
class FakeResult:
    """What a step returns."""

    loss: float
    grad_norm: float | None
    lr: float
    skipped: bool
    loss_scale: float = 1.0
    first_not_finite: str | None = "head.weight"
    unit_loads: int = 4
    nvme_read_bytes: int = 100
    nvme_write_bytes: int = 0
    all_gather_bytes: int = 30
    reduce_scatter_bytes: int = 20
    broadcast_bytes: int = 0


@dataclass
class FakeUnit:
    """The one number as a unit of a checkpoint."""

    state: float
    name: str = "root"
    specs: tuple[TensorSpec, ...] = (STATE,)

    def pieces(self) -> Iterator[tuple[str, int, bytes]]:
        yield STATE.name, 0, struct.pack("<d", self.state)


class FakeEngine:
    """Adds to one number what the tokens of all ranks say, in the order of the step's micro-batches.

    `skip_steps` are not finite, `step_seconds` is how long a step takes.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        skip_steps: Sequence[int] = (),
        fail_at: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.ledger = Ledger({Tier.CPU: 1 << 30})
        self.plan = FakePlan()
        self.group = group or Local()
        self.recorder = Recorder()
        self.io = IoFacts("uring", registered_files=True, registered_buffers=False)
        self.pending_bytes = 0  # of the last step's update, written when something asks for the state or the next step runs
        self.state = 0.0
        self.steps = 0
        self.closed = False
        self.evaluated: list[int] = []
        self._training = True
        self._step_seconds = step_seconds
        self._skip_steps = set(skip_steps)
        self._fail_at = fail_at

    def train_batch(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> FakeResult:
        self.steps += 1
        written, self.pending_bytes = self.pending_bytes, 50
        if self.steps == self._fail_at:
            raise OSError(28, "No space left on device")
        time.sleep(self._step_seconds)
        means = []
        for micro_batch in micro_batches:
            tokens, targets = micro_batch["tokens"], micro_batch["targets"]
            assert tokens.dtype == targets.dtype == torch.int64
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            means.append(float(tokens.double().mean()))
        self.group.begin_step(self.steps)
        of_ranks = self.group.gather(means, what="means")
        for index, mean in enumerate(mean for of_rank in of_ranks for mean in of_rank):  # type: ignore[union-attr]
            self.state += mean * (index + 1)  # type: ignore[operator]
        if self.steps in self._skip_steps:
            return FakeResult(float("nan"), float("inf"), 0.1, skipped=True, nvme_write_bytes=written)
        return FakeResult(1.0 / self.state, 2.0, 0.1, skipped=False, nvme_write_bytes=written)

    def __call__(self, *, tokens: Tensor, targets: Tensor) -> Tensor:
        assert not self._training
        assert not torch.is_grad_enabled()
        self.recorder.count("nvme_read_bytes", 1000)
        self.evaluated.append(int(tokens[0, 0]))
        return targets.double().mean()

    def train(self) -> None:
        self._training = True

    def eval(self) -> None:
        self._training = False

    def save_checkpoint(self, directory: Path, *, client_state: Mapping[str, Any], keep: int) -> Path:
        counters = Counters(self.steps, self.steps, 0, self.steps, {})
        state = CheckpointState(Fingerprint((), {}), "fp32", counters, dict(client_state), None)
        self.recorder.count("nvme_read_bytes", 5000)
        path = None
        if self.group.rank == 0:
            path = str(write_checkpoint(directory, [FakeUnit(self.state)], state, keep=keep))
        return Path(str(self.group.gather(path, what="checkpoint")[0]))

    def load_checkpoint(self, path: Path) -> tuple[Path, Mapping[str, Any]]:
        with open_checkpoint(path) as checkpoint:
            into = bytearray(8)
            checkpoint.read("state", "weight", 0, 1, into)
            self.state = struct.unpack("<d", into)[0]
            self.steps = checkpoint.state.counters.global_step
            return path, checkpoint.state.data_position

    def synchronize(self) -> None:
        self.recorder.count("nvme_write_bytes", self.pending_bytes)
        self.pending_bytes = 0

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in reversed(list(build_meta_gpt(preset("gpt-1m"), torch.float32).named_parameters())):
            yield name, torch.full(shape.shape, float(len(name)))

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.closed = True
        if error is not None:
            self.group.fail(str(error))
        self.group.close()


def fake_options(output: Path, data: Path, nvme: Sequence[Path] = (), **changes: Any) -> TrainOptions:
    """Return options of a tiny run on `data` into `output`."""
    steps = changes.pop("steps", 6)
    batch = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": changes.pop("batch_size", 6), "bf16.enabled": False}
    layer = Layer("test", {**batch, "infinity.nvme": [str(path) for path in nvme]})
    config = resolve_config([layer], model="gpt-1m", steps=steps, has_native_bf16=False)
    return TrainOptions(config=config, model="gpt-1m", steps=steps, seq_len=16, data=(data,), output=output, **changes)


def fake_group(store: dist.Store, rank: int, size: int) -> Group:
    """Return the group of one rank over loopback; all ranks open theirs together."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return open_group(
        Rendezvous(store, rank, size),
        device=torch.device("cpu"),
        recorder=Recorder(),
        resident_bytes=lambda: 0,
        pace=Pace(beat_seconds=0.05, dead_seconds=20.0),
    )


def opener(engine: FakeEngine) -> Any:
    """Return what the loop opens its engine with."""

    def open_engine(checked: Checked, reporter: Reporter) -> FakeEngine:
        return engine

    return open_engine
