"""Which requests a job makes: directions, places in the file, places in memory, how many at a time."""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
from bench_fakes import RecordingEngine

from infinity.aio.files import DirectFile, open_direct
from infinity.aio.request import Op
from infinity.bench.nvme_jobs import Job, Traffic, batches_of
from infinity.bench.nvme_measure import Timing, latencies, measure, run_steadily
from infinity.bench.nvme_stream import Stream, Target
from infinity.byte_sizes import MIB
from infinity.errors import StorageError
from infinity.memory.arena import open_arena
from infinity.memory.ledger import Ledger
from infinity.states import Tier

FILE_BYTES = 256 * MIB


@pytest.fixture
def file(tmp_path: Path) -> DirectFile:
    return open_direct(tmp_path / "file", create=True)


def target_for(job: Job, file: DirectFile) -> Target:
    arena = open_arena(batches_of(job).num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="test", pin=False)
    return Target(file, FILE_BYTES, arena.buffer)


def stream_through(job: Job, file: DirectFile, num_batches: int) -> tuple[RecordingEngine, Target]:
    engine, target = RecordingEngine(), target_for(job, file)
    stream = Stream(engine, job, target, batches_of(job))
    stream.start()
    moved = sum(stream.advance() for _ in range(num_batches)) + stream.drain()
    assert moved == sum(request.length for request in engine.requests)
    return engine, target


def test_large_blocks_walk_through_the_file_and_start_again(file: DirectFile) -> None:
    """Requests follow one another to the end of the file, then begin at its start; none reaches beyond it."""
    engine, _ = stream_through(Job(Traffic.WRITE, MIB, 32), file, 40)
    offsets = [request.offset for request in engine.requests]
    assert offsets == [index * 8 * MIB % FILE_BYTES for index in range(len(offsets))]
    assert {request.op for request in engine.requests} == {Op.WRITE}


def test_mixed_traffic_takes_turns_and_each_direction_walks_for_itself(file: DirectFile) -> None:
    """As many reads as writes, in turn; the reads alone are sequential, and so are the writes."""
    engine, _ = stream_through(Job(Traffic.MIXED, MIB, 32), file, 20)
    ops = [request.op for request in engine.requests]
    assert ops == [Op.READ, Op.WRITE] * (len(ops) // 2)
    for op in Op:
        offsets = [request.offset for request in engine.requests if request.op is op]
        assert offsets == [index * 8 * MIB for index in range(len(offsets))]


def test_small_blocks_are_spread_over_the_file(file: DirectFile) -> None:
    """Places are whole blocks inside the file, in both halves of it, and hardly ever the same."""
    engine, _ = stream_through(Job(Traffic.READ, 4096, 64), file, 30)
    offsets = [request.offset for request in engine.requests]
    assert all(offset % 4096 == 0 and 0 <= offset <= FILE_BYTES - 4096 for offset in offsets)
    assert len(set(offsets)) > 0.9 * len(offsets)
    assert 0.4 < sum(offset < FILE_BYTES // 2 for offset in offsets) / len(offsets) < 0.6
    assert {len(batch) for batch in engine.batches} == {64}


@pytest.mark.parametrize("job", [Job(Traffic.MIXED, 4096, 16), Job(Traffic.READ, MIB, 32), Job(Traffic.WRITE, 4 * MIB, 16)])
def test_no_two_requests_in_flight_share_memory(job: Job, file: DirectFile) -> None:
    """What is in flight at any time lies side by side in the buffers, inside of them."""
    engine, target = stream_through(job, file, 12)
    batches = batches_of(job)
    in_flight: deque[range] = deque(maxlen=batches.num_batches * batches.requests_per_batch)
    for request in engine.requests:
        in_flight.append(range(request.address, request.address + request.length))
        ordered = sorted(in_flight, key=lambda place: place.start)
        assert all(a.stop <= b.start for a, b in pairwise(ordered))
        assert ordered[0].start >= target.memory.address
        assert ordered[-1].stop <= target.memory.address + target.memory.num_bytes
    assert engine.most_in_flight == batches.num_batches * batches.requests_per_batch


def test_a_run_has_a_rate_for_each_window_and_counts_every_byte(file: DirectFile) -> None:
    """The whole run counts warm-up, windows and what was drained; only traffic that writes has an fsync."""
    for traffic in Traffic:
        engine, job = RecordingEngine(), Job(traffic, MIB, 32)
        measured = measure([(engine, target_for(job, file))], job, Timing(0.002, 0.002, 3, 0.0))
        assert len(measured.rates) == 3
        assert all(rate > 0 for rate in measured.rates)
        assert measured.num_bytes == sum(request.length for request in engine.requests)
        assert (measured.fsync_seconds is None) == (traffic is Traffic.READ)
        assert measured.cpu_seconds_per_gb >= 0


@pytest.mark.parametrize("num_bytes", [4096, MIB])
def test_latencies_are_those_of_single_blocks_while_the_queue_is_full(file: DirectFile, num_bytes: int) -> None:
    """A request is a block, more than the depth are at the engine, and those with which it runs empty do not count."""
    job = Job(Traffic.READ, num_bytes, 4)
    engine, target = RecordingEngine(), target_for(job, file)
    found = latencies(engine, target, job, 0.0, threading.Event())
    assert found.microseconds == tuple(float(number + 1) for number in range(job.queue_depth))
    assert found.num_bytes == sum(request.length for request in engine.requests)
    assert {request.length for request in engine.requests} == {num_bytes}
    assert engine.most_in_flight >= 2 * job.queue_depth
    assert max(request.address for request in engine.requests) + num_bytes <= target.memory.address + target.memory.num_bytes


def test_a_failed_request_ends_the_measurement(file: DirectFile) -> None:
    """There is no result of a run in which a request failed (C30)."""
    job = Job(Traffic.READ, MIB, 32)
    engine = RecordingEngine(fails_at=5)
    with pytest.raises(StorageError, match="the disk is gone"):
        run_steadily(engine, target_for(job, file), job, Timing(0.0, 0.1, 1, 0.0), threading.Event())


def test_side_by_side_ends_the_others_when_one_fails(file: DirectFile) -> None:
    """Of two disks one fails: the other's run, which would take an hour, ends and the failure is raised."""
    job = Job(Traffic.READ, MIB, 32)
    pairs = [(RecordingEngine(), target_for(job, file)), (RecordingEngine(fails_at=3), target_for(job, file))]
    with pytest.raises(StorageError, match="the disk is gone"):
        measure(pairs, job, Timing(0.0, 3600.0, 1, 0.0))
