"""Overlap shown by the order of events, never by time: reads beside Adam, updates beside the next forward."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kit import Bulk, Kit, open_engine, settings
from slow_units import NUM_UNITS, WIDTH, SlowModel

from infinity.telemetry.recorder import Recorder, Span


def spans_of(recorder: Recorder, name: str) -> list[Span]:
    return sorted((span for span in recorder.spans() if span.name == name), key=lambda span: span.start_ns)


@pytest.mark.parametrize("tile_slots", [3, 8])
def test_reads_begin_before_the_computation_before_ends(tile_slots: int, nvme: Path) -> None:
    """The read of tile k+1 begins before the computation of tile k ends, also from one unit to the next."""
    kit = Kit("bulk", lambda: Bulk(width=WIDTH), lambda generator, step: (torch.randn(2, WIDTH, generator=generator),))
    config = settings(nvme, optim="nvme", params="nvme", tile_bytes="8KiB", tile_slots=tile_slots)
    with open_engine(kit.build(), config) as engine:
        for step in range(3):
            engine.train_batch(kit.batches(step, 1, torch.bfloat16))
        engine.synchronize()
        begin = engine.recorder.now_ns()
        engine.train_batch(kit.batches(3, 1, torch.bfloat16))
        engine.synchronize()
        computed = [span for span in spans_of(engine.recorder, "update.compute") if span.start_ns > begin]
        reads = defaultdict(list)
        for span in spans_of(engine.recorder, "update.read"):
            reads[span.attributes["shard"], span.attributes["tile"]].append(span)
    assert len(computed) >= 24 * 5
    pairs = list(pairwise(computed))
    overlapped = 0
    for first, second in pairs:
        read = max(
            (
                span
                for span in reads[second.attributes["shard"], second.attributes["tile"]]
                if span.start_ns < second.start_ns
            ),
            key=lambda span: span.start_ns,
        )
        overlapped += read.start_ns < first.end_ns
    assert overlapped >= 0.9 * len(pairs)


@pytest.mark.parametrize("params", ["nvme", "cpu"])
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_updates_run_beside_the_next_forward(schedule: str, params: str, nvme: Path) -> None:
    """The update of unit u+1 begins before unit u's forward has ended, and unit u's forward waits for its own alone:

    it runs before the updates of the last units have been made. Weights that stay in RAM are updated beside forward too.
    """
    log: list[tuple[int, int, int]] = []
    torch.manual_seed(0)
    config = settings(
        nvme, optim="nvme", params=params, tile_bytes="4KiB", tile_slots=2, weight_slots=2, schedule=schedule, check=False
    )
    x = torch.randn(2, WIDTH).bfloat16()
    with open_engine(SlowModel(log), config) as engine:
        for _ in range(2):
            engine.train_batch([x])
        log.clear()
        begin = engine.recorder.now_ns()
        engine.train_batch([x])
        engine.synchronize()
        first_reads, last_computed = {}, {}
        for span in spans_of(engine.recorder, "update.read"):
            if span.start_ns > begin:
                first_reads.setdefault(span.attributes["shard"], span.start_ns)
        for span in spans_of(engine.recorder, "update.compute"):
            last_computed[span.attributes["shard"]] = span.end_ns
    forward = {}
    for number, started, ended in log:
        forward.setdefault(number, (started, ended))  # reruns come later
    for unit in range(2, NUM_UNITS - 1):
        assert first_reads[unit + 1] < forward[unit][1]
    if params == "nvme":  # two slots: the last units' updates cannot have begun
        assert first_reads[NUM_UNITS - 1] > forward[1][0]
