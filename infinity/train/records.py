"""What a run leaves on disk beside checkpoints and weights: plan.json, config.json, metrics.jsonl, summary.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from infinity.telemetry.jsonl import JsonLines, open_jsonl
from infinity.train.output import Output, write_json
from infinity.train.reporter import StepRecord


class Records(Protocol):
    """Where the loop leaves what it did."""

    def begin(self, *, config: Mapping[str, object], plan: Mapping[str, object]) -> None:
        """Write down what is going to run."""
        ...

    def cut_after(self, step: int) -> int:
        """Drop the steps after this one, which are taken anew; return how many there were."""
        ...

    def step(self, record: StepRecord) -> None:
        """Add a finished step."""
        ...

    def end(self, summary: Mapping[str, object]) -> None:
        """Write down what the run came to."""
        ...


class WrittenRecords:
    """Records as files of the output directory."""

    def __init__(self, output: Output, metrics: JsonLines) -> None:
        self._output = output
        self._metrics = metrics

    def begin(self, *, config: Mapping[str, object], plan: Mapping[str, object]) -> None:
        write_json(self._output.config, config)
        write_json(self._output.plan, plan)

    def cut_after(self, step: int) -> int:
        return self._metrics.truncate_after(step)

    def step(self, record: StepRecord) -> None:
        self._metrics.append(record.as_json())

    def end(self, summary: Mapping[str, object]) -> None:
        write_json(self._output.summary, summary)


class NoRecords:
    """Records of a rank whose steps another rank writes down."""

    def begin(self, *, config: Mapping[str, object], plan: Mapping[str, object]) -> None: ...
    def cut_after(self, step: int) -> int:
        return 0

    def step(self, record: StepRecord) -> None: ...
    def end(self, summary: Mapping[str, object]) -> None: ...


@contextmanager
def open_records(output: Output, *, writes: bool) -> Iterator[Records]:
    """Yield the records of a run whose output directory is held; raises StorageError when the disk refuses."""
    if not writes:
        yield NoRecords()
        return
    with open_jsonl(output.metrics) as metrics:
        yield WrittenRecords(output, metrics)
