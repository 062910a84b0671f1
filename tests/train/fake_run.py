"""A training run on the fake engine, as a program of its own: OUTPUT DATA STEPS STEP_SECONDS."""

from __future__ import annotations

import sys
from pathlib import Path

from training_fakes import FakeEngine, Remembering, fake_options, opener

from infinity.cli.failures import failures_explained
from infinity.train.loop import train
from infinity.train.preflight import check_run


class Announcing(FakeEngine):
    """Says on stdout when a step begins, so that the test knows when to signal."""

    def train_batch(self, micro_batches):  # type: ignore[no-untyped-def]
        print(f"begins {self.steps + 1}", flush=True)
        return super().train_batch(micro_batches)


class Speaking(Remembering):
    """Says on stdout what it is told."""

    def step(self, record, progress) -> None:  # type: ignore[no-untyped-def]
        print(f"step {record.step}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


if __name__ == "__main__":
    output, data, steps, step_seconds = sys.argv[1:]
    reporter = Speaking()
    with failures_explained():
        checked = check_run(fake_options(Path(output), Path(data), steps=int(steps)), reporter)
        summary = train(checked, reporter, opener(Announcing(float(step_seconds))))
    sys.exit(summary.exit_code)
