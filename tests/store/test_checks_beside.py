"""Checksums are taken beside: on threads of the store, whatever order the disk answers in, until the store is closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from store_cases import content, fill, fill_store, make_store, odd_layouts, on_nvme, page_buffer
from test_flipped_bits import flip, place_of

from infinity.aio.engine import Engine
from infinity.aio.faults import FaultyEngine
from infinity.aio.request import Request
from infinity.errors import SwapCorruptionError
from infinity.handles import Handle
from infinity.store.checksums import Checksums

THREADS = {"checksums-of-reads", "checksums-of-writes"}


def running() -> set[str]:
    """Return which of the store's threads there are now."""
    return THREADS & {thread.name for thread in threading.enumerate()}


class GatedEngine(FaultyEngine):
    """Lets requests to the addresses in `held` end only when `gate` is set."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, [])
        self.held: set[int] = set()
        self.gate = threading.Event()

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        handles = super().submit(requests)
        pairs = zip(requests, handles, strict=True)
        return [_Gated(handle, self.gate) if request.address in self.held else handle for request, handle in pairs]


class _Gated:
    def __init__(self, handle: Handle[None], gate: threading.Event) -> None:
        self._handle = handle
        self._gate = gate

    def wait(self) -> None:
        self._gate.wait()
        self._handle.wait()

    def done(self) -> bool:
        return self._gate.is_set() and self._handle.done()


def test_reads_that_nobody_waits_for_are_compared_all_the_same(tmp_path: Path, engine: Engine) -> None:
    """Good ones and bad ones: they become done one by one, a bad one stops nobody, and its error waits for its reader."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    expected = fill_store(store, shards)
    for shard in (0, 2):
        flip(*place_of(store, shard)[:2])
    into = [page_buffer(layout.shard_weight_bytes) for layout, _ in shards]
    handles = [store.fetch_weights(shard, buffer) for shard, buffer in enumerate(into)]
    while not all(handle.done() for handle in handles):
        pass
    for shard, (handle, buffer) in enumerate(zip(handles, into, strict=True)):
        if shard in (0, 2):
            for _ in range(2):
                with pytest.raises(SwapCorruptionError, match=f"weights of unit{shard}"):
                    handle.wait()
        else:
            handle.wait()
            assert torch.equal(content(buffer, shards[shard][0].shard_weight_bytes), expected[shard])
    store.close()


@pytest.mark.parametrize("flipped", [False, True])
def test_a_read_that_ends_before_an_older_one_is_compared_at_once(
    tmp_path: Path, threads_engine: Engine, flipped: bool
) -> None:
    """The thread waits for the older read; whoever needs the younger one compares it himself."""
    shards = on_nvme(odd_layouts())
    engine = GatedEngine(threads_engine)
    store = make_store([tmp_path], engine, shards)
    expected = fill_store(store, shards)
    older, younger = (page_buffer(shards[shard][0].shard_weight_bytes) for shard in (0, 1))
    engine.held.add(older.address)
    if flipped:
        flip(*place_of(store, 1)[:2])
    first, second = store.fetch_weights(0, older), store.fetch_weights(1, younger)
    if flipped:
        with pytest.raises(SwapCorruptionError, match="weights of unit1"):
            second.wait()
    else:
        second.wait()
        assert torch.equal(content(younger, shards[1][0].shard_weight_bytes), expected[1])
    assert (first.done(), second.done()) == (False, True)
    engine.gate.set()
    first.wait()
    assert torch.equal(content(older, shards[0][0].shard_weight_bytes), expected[0])
    store.close()


def test_a_store_is_closed_with_reads_in_flight(tmp_path: Path, threads_engine: Engine) -> None:
    """Closing waits for them and for their comparison; then both threads are gone and every handle is over."""
    shards = on_nvme(odd_layouts())
    engine = GatedEngine(threads_engine)
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    assert running() == THREADS
    flip(*place_of(store, 0)[:2])
    into = [page_buffer(layout.shard_weight_bytes) for layout, _ in shards]
    engine.held |= {buffer.address for buffer in into}
    handles = [store.fetch_weights(shard, buffer) for shard, buffer in enumerate(into)]
    store.fetch_tile(shards[0][0].tiles[0])  # its lease is never taken
    closing = threading.Thread(target=store.close)
    closing.start()
    assert not any(handle.done() for handle in handles)
    engine.gate.set()
    closing.join()
    assert all(handle.done() for handle in handles)
    assert running() == set()
    with pytest.raises(SwapCorruptionError, match="weights of unit0"):
        handles[0].wait()
    store.close()


def test_a_write_is_over_when_its_checksum_is_known(
    tmp_path: Path, threads_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its buffer may not change; what is read after it is compared with it."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    summing, may_sum, real = threading.Event(), threading.Event(), Checksums.of

    def slow(self: Checksums, address: int, num_bytes: int) -> int:
        summing.set()
        may_sum.wait()
        return real(self, address, num_bytes)

    num_bytes = shards[0][0].shard_weight_bytes
    source, into = page_buffer(num_bytes), page_buffer(num_bytes)
    expected = fill(source, 42)
    monkeypatch.setattr(Checksums, "of", slow)
    write = store.publish_weights(0, source)
    summing.wait()
    path, offset, length = place_of(store, 0)
    while path.read_bytes()[offset : offset + length] != bytes(expected[:length].tolist()):
        pass  # until the bytes are there
    assert not write.done()
    may_sum.set()
    store.fetch_weights(0, into).wait()
    assert write.done()
    assert torch.equal(content(into, num_bytes), expected[:num_bytes])
    flip(path, offset)
    with pytest.raises(SwapCorruptionError, match="weights of unit0"):
        store.fetch_weights(0, into).wait()
    store.close()


def test_a_commit_right_behind_a_write_records_its_checksum(tmp_path: Path, threads_engine: Engine) -> None:
    """Nobody waited for the write: its checksum is in the checkpoint all the same, and a flipped bit is found."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    source = page_buffer(shards[0][0].shard_weight_bytes)
    expected = fill(source, 42)
    store.publish_weights(0, source)
    store.commit_in_place({})
    run, (path, offset, length) = store.directories[0], place_of(store, 0)
    store.close(keep=True)
    for flipped in (False, True):
        if flipped:
            flip(path, offset)
        adopted, into = make_store([], threads_engine, shards, adopt=run), page_buffer(length)
        handle = adopted.fetch_weights(0, into)
        if flipped:
            with pytest.raises(SwapCorruptionError, match="weights of unit0"):
                handle.wait()
        else:
            handle.wait()
            assert torch.equal(content(into, length), expected[:length])
        adopted.close()


def test_without_checksums_there_is_no_thread(tmp_path: Path, threads_engine: Engine) -> None:
    """A thread only where something is checked."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards, checksums=False)
    fill_store(store, shards)
    assert running() == set()
    store.close()
