"""A training job as each of its ranks runs it: the preflight, the plan, the loop, and what its reporter was told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.comm.launched import launched_ranks
from infinity.config import Layer
from infinity.train.assemble import open_training_engine
from infinity.train.loop import train
from infinity.train.options import TrainOptions, resolve_config
from infinity.train.preflight import check_run
from infinity.train.voice import Silent


@dataclass
class Heard(Silent):
    """A reporter that keeps the notes, the rows and the number of steps that it was told."""

    notes: list[str] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    num_steps: int = 0
    lose: Path | None = None  # a file that is cut short after the second step

    def note(self, text: str) -> None:
        self.notes.append(text)

    def plan(self, rows: Any) -> None:
        self.rows |= {row.name: row.value for row in rows}

    def step(self, record: Any, progress: Any) -> None:
        self.num_steps += 1
        if self.lose is not None and self.num_steps == 2:
            self.lose.write_bytes(b"")

    def summary(self, rows: Any) -> None:
        self.plan(rows)


def train_job(
    text: Path, output: Path, keys: dict[str, object], *, steps: int, lose: Path | None = None, **options: Any
) -> tuple[dict[str, object], Heard]:
    """Train gpt-1m as one rank; return its summary and what its reporter has heard."""
    config = resolve_config([Layer("test", keys)], model="gpt-1m", steps=steps, has_native_bf16=False)
    given = TrainOptions(config=config, model="gpt-1m", steps=steps, seq_len=24, data=(text,), output=output, **options)
    heard = Heard(lose=lose)
    summary = train(check_run(given, heard, launched_ranks()), heard, open_training_engine)
    return summary.as_json(), heard
