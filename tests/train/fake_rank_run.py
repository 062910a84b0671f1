"""One rank of a training run on the fake engine, as a launcher starts it: OUTPUT DATA STEPS STEP_SECONDS FAIL_AT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fake_run import Announcing, Speaking
from training_fakes import fake_group, fake_options

from infinity.cli.failures import failures_explained
from infinity.cli.leaving import failed_ranks_leave_at_once
from infinity.comm.launched import launched_ranks
from infinity.comm.open_group import meet
from infinity.errors import StorageError
from infinity.train.loop import train
from infinity.train.preflight import Checked, check_run
from infinity.train.reporter import Reporter
from infinity.train.voice import Silent


class Failing(Announcing):
    """Fails at a step, on rank 1 only."""

    fail_step = 0

    def train_batch(self, micro_batches):  # type: ignore[no-untyped-def]
        if self.group.rank == 1 and self.steps + 1 == self.fail_step:
            raise StorageError("rank 1 has lost its disk", remedy="Look for it.")
        return super().train_batch(micro_batches)


def main() -> None:
    """Run as one rank; what only this rank knows is a note of its preflight."""
    output, data, steps, step_seconds, fail_step = sys.argv[1:]
    ranks = launched_ranks()

    def open_engine(checked: Checked, reporter: Reporter) -> Failing:
        reporter.note("every rank says this")
        reporter.note(f"rank {ranks.global_rank} says this" if ranks.global_rank else "rank 0 begins")
        rendezvous = meet(os.environ)
        assert rendezvous is not None
        engine = Failing(float(step_seconds), group=fake_group(rendezvous.store, ranks.global_rank, ranks.world_size))
        engine.fail_step = int(fail_step)
        return engine

    with failed_ranks_leave_at_once(), failures_explained():
        reporter = Speaking() if ranks.speaks else Silent()
        options = fake_options(Path(output), Path(data), steps=int(steps), batch_size=12)
        summary = train(check_run(options, reporter, ranks), reporter, open_engine)
        sys.exit(summary.exit_code)


if __name__ == "__main__":
    main()
