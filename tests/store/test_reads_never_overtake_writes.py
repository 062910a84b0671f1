"""Whoever fetches what is being written gets the new bytes, and whoever writes what is being read spoils no reader."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from store_cases import LazyEngine, content, fill, fill_store, make_store, odd_layouts, on_nvme, page_buffer

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op
from infinity.errors import IllegalTransition, StorageError
from infinity.states import Lifecycle
from infinity.store.extents import gradient_window
from infinity.store.tiles import TILE_MOVES, TileState


def test_a_fetched_tile_has_the_bytes_of_the_write_in_flight(tmp_path: Path, threads_engine: Engine) -> None:
    """With writes that happen only when waited for, a fetch that did not wait would read old bytes."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], LazyEngine(threads_engine), shards)
    fill_store(store, shards)
    tile = shards[0][0].tiles[0]
    lease = store.fetch_tile(tile).wait()
    expected = fill(lease.buffer, 42)
    store.publish_tile(tile, lease)  # nobody waits for it
    fetched = store.fetch_tile(tile).wait()
    assert torch.equal(content(fetched.buffer, tile.extent_bytes), expected)
    fetched.release()
    store.close()


def test_fetched_weights_have_the_bytes_of_the_write_in_flight(tmp_path: Path, threads_engine: Engine) -> None:
    """The same for weights."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], LazyEngine(threads_engine), shards)
    fill_store(store, shards)
    num_bytes = shards[0][0].shard_weight_bytes
    source, into = page_buffer(num_bytes), page_buffer(num_bytes)
    expected = fill(source, 42)
    store.publish_weights(0, source)
    store.fetch_weights(0, into).wait()
    assert torch.equal(content(into, num_bytes), expected)
    store.close()


def test_fetched_gradients_have_the_bytes_of_the_write_in_flight(tmp_path: Path, threads_engine: Engine) -> None:
    """The same for spilled gradients."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], LazyEngine(threads_engine), shards)
    source = page_buffer(shards[0][0].grad_bytes(2))
    fill(source, 1)
    store.publish_gradients(0, source).wait()
    expected = fill(source, 2)
    store.publish_gradients(0, source)
    window = gradient_window(shards[0][0].tiles[1], 2)
    into = page_buffer(window.num_bytes)
    store.fetch_gradients(shards[0][0].tiles[1], into).wait()
    assert torch.equal(content(into, window.num_bytes), expected[window.offset :][: window.num_bytes])
    store.close()


def test_a_write_waits_for_the_reads_and_the_write_before_it(tmp_path: Path, threads_engine: Engine) -> None:
    """Read, write, write: done in this order although nobody waited for any of them."""
    shards = on_nvme(odd_layouts())
    engine = LazyEngine(threads_engine)
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    num_bytes = shards[0][0].shard_weight_bytes
    first, second, into = (page_buffer(num_bytes) for _ in range(3))
    old = page_buffer(num_bytes)
    store.fetch_weights(0, old).wait()
    before, expected = content(old, num_bytes), fill(second, 2)
    fill(first, 1)
    engine.done.clear()
    store.fetch_weights(0, into)
    store.publish_weights(0, first)
    store.publish_weights(0, second)
    store.sync()
    assert [(request.op, request.address) for request in engine.done] == [
        (Op.READ, into.address), (Op.WRITE, first.address), (Op.WRITE, second.address),
    ]  # fmt: skip
    assert torch.equal(content(into, num_bytes), before)
    store.fetch_weights(0, into).wait()
    assert torch.equal(content(into, num_bytes), expected)
    store.close()


def test_a_slot_in_flight_is_not_reused_before_it_is_written(tmp_path: Path, threads_engine: Engine) -> None:
    """With one slot the next tile waits for the write of the last one, and that one's bytes are right."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], LazyEngine(threads_engine), shards, num_tile_slots=1)
    tiles = shards[0][0].tiles
    expected = {}
    for tile in tiles:
        lease = store.new_tile(tile)
        expected[tile.index] = fill(lease.buffer, tile.index)
        store.publish_tile(tile, lease)
    for tile in tiles:
        lease = store.fetch_tile(tile).wait()
        assert torch.equal(content(lease.buffer, tile.extent_bytes), expected[tile.index])
        lease.release()
    store.close()


def test_a_failed_write_is_an_error_of_its_handle_and_of_every_later_use(tmp_path: Path, threads_engine: Engine) -> None:
    """The write's handle says file, offset, errno and free space; a later read says the same, never a size. C3."""
    failing: list[bool] = [False]
    fault = Fault(FaultKind.ERROR, lambda request: failing[0] and request.op is Op.WRITE, errno=errno.ENOSPC)
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], FaultyEngine(threads_engine, [fault]), shards)
    fill_store(store, shards)
    tile = shards[0][0].tiles[1]
    lease = store.fetch_tile(tile).wait()
    failing[0] = True
    write = store.publish_tile(tile, lease)
    swap = store.directories[0] / "swap.bin"
    for use in (write.wait, lambda: store.fetch_tile(tile), store.sync):
        with pytest.raises(StorageError, match=rf"offset \d+ of {swap} failed: .*errno 28.* \d+ bytes are free") as caught:
            use()
        assert caught.value.errno == errno.ENOSPC
    failing[0] = False
    other = store.fetch_tile(shards[0][0].tiles[0])  # everything else goes on
    other.wait().release()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_read_gives_the_slot_back_and_may_be_tried_again(tmp_path: Path, threads_engine: Engine) -> None:
    """A read error loses neither the slot nor the tile."""
    failing: list[bool] = [False]
    fault = Fault(FaultKind.ERROR, lambda request: failing[0] and request.op is Op.READ, errno=errno.EIO)
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], FaultyEngine(threads_engine, [fault]), shards, num_tile_slots=1)
    expected = fill_store(store, shards)
    tile = shards[0][0].tiles[0]
    failing[0] = True
    handle = store.fetch_tile(tile)
    for _ in range(2):
        with pytest.raises(StorageError, match="errno 5"):
            handle.wait()
    failing[0] = False
    lease = store.fetch_tile(tile).wait()
    assert torch.equal(content(lease.buffer, tile.state_bytes), expected[tile])
    lease.release()
    store.close()


def test_closing_with_leases_and_fetches_out_frees_everything(tmp_path: Path, threads_engine: Engine) -> None:
    """After an error elsewhere nobody gives leases back; close does."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    tiles = shards[0][0].tiles
    store.fetch_tile(tiles[0]).wait()
    store.fetch_tile(tiles[1])  # not even waited for
    store.publish_tile(tiles[2], store.fetch_tile(tiles[2]).wait())
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", list(TileState))
@pytest.mark.parametrize("target", list(TileState))
def test_every_illegal_move_of_a_tile_names_both_states(state: TileState, target: TileState) -> None:
    """The table of legal moves is the whole truth."""
    lifecycle = Lifecycle("tile 0 of unit", state, TILE_MOVES)
    if target in TILE_MOVES[state]:
        lifecycle.to(target)
        assert lifecycle.state is target
    else:
        with pytest.raises(IllegalTransition, match=f"{state.name} cannot become {target.name}"):
            lifecycle.to(target)
