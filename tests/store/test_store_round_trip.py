"""What is published is fetched again bit for bit, wherever it lives, through the real engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from store_cases import (
    assert_same_bytes,
    content,
    fill,
    fill_store,
    in_memory,
    make_store,
    mixed,
    odd_layouts,
    on_nvme,
    page_buffer,
    read_store,
)

from infinity.aio.engine import Engine
from infinity.errors import ConfigError, IllegalTransition, OverBudget, StorageError
from infinity.memory.ledger import Ledger
from infinity.states import Tier
from infinity.store.extents import gradient_window
from infinity.store.layout import ShardLayout
from infinity.store.shares import ShardShares
from infinity.telemetry.recorder import Recorder

Placing = Callable[[Sequence[ShardLayout]], list[tuple[ShardLayout, ShardShares]]]
PLACINGS = [on_nvme, mixed, in_memory]


@pytest.mark.parametrize("place", PLACINGS)
@pytest.mark.parametrize("num_directories", [1, 3])
def test_weights_and_tiles_come_back_bit_for_bit(
    tmp_path: Path, engine: Engine, place: Placing, num_directories: int
) -> None:
    """Sizes that are no multiples of 512 and a scalar, twice over, in any placement. C1, C2, C15."""
    directories = [tmp_path / f"disk{number}" for number in range(num_directories)]
    shards = place(odd_layouts())
    store = make_store(directories, engine, shards)
    for seed in (1, 2):
        expected = fill_store(store, shards, seed)
        assert_same_bytes(read_store(store, shards), expected)
    store.close()
    assert [item for path in directories if path.exists() for item in path.iterdir()] == []


@pytest.mark.parametrize("place", PLACINGS)
def test_gradients_of_a_tile_are_where_the_window_says(tmp_path: Path, engine: Engine, place: Placing) -> None:
    """A tile's gradients begin inside a page; spilled and resident ones are read alike."""
    shards = place(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    for layout, _ in shards:
        grad_bytes = layout.grad_bytes(2)
        if not grad_bytes:
            assert store.gradients(layout.index) is None
            continue
        source = page_buffer(grad_bytes)
        expected = fill(source, layout.index)
        store.publish_gradients(layout.index, source).wait()
        for tile in layout.tiles:
            window = gradient_window(tile, 2)
            into = page_buffer(window.num_bytes)
            store.fetch_gradients(tile, into).wait()
            found = content(into, window.num_bytes)[window.lead_bytes :][: tile.num_elements * 2]
            assert torch.equal(found, expected[tile.state_offset * 2 :][: tile.num_elements * 2])
    store.close()


def test_resident_states_are_the_buffers_themselves(tmp_path: Path, threads_engine: Engine) -> None:
    """Nothing is copied or read when weights, gradients and tiles stay in RAM, and no directory is touched."""
    shards, recorder = in_memory(odd_layouts()), Recorder()
    store = make_store([tmp_path / "absent"], threads_engine, shards, recorder=recorder)
    expected = fill_store(store, shards)
    weights = store.weights(0)
    assert weights is not None
    fill(weights, 99)
    store.publish_weights(0, weights).wait()
    assert torch.equal(read_store(store, shards)[0], content(weights, shards[0][0].shard_weight_bytes))
    tile = shards[0][0].tiles[0]
    handle = store.fetch_tile(tile)
    assert handle.done()
    assert torch.equal(content(handle.wait().buffer, tile.state_bytes), expected[tile])
    assert (store.num_tile_slots, store.directories) == (0, ())
    assert not (tmp_path / "absent").exists()
    assert recorder.counters().get("nvme_read_bytes", 0) == recorder.counters().get("nvme_write_bytes", 0) == 0
    store.close()


def test_bytes_are_counted_in_whole_pages(tmp_path: Path, threads_engine: Engine) -> None:
    """Counters are the padded lengths that the disk moves; spilled gradients are also counted by themselves."""
    shards, recorder = on_nvme(odd_layouts()), Recorder()
    store = make_store([tmp_path], threads_engine, shards, recorder=recorder)
    fill_store(store, shards)
    read_store(store, shards)
    layouts = [layout for layout, _ in shards]
    state = sum(tile.extent_bytes for layout in layouts for tile in layout.tiles)
    weights = sum(layout.shard_weight_bytes for layout in layouts)
    assert recorder.counters() == {"nvme_read_bytes": state + weights, "nvme_write_bytes": state + weights}
    gradient = page_buffer(layouts[0].grad_bytes(2))
    store.publish_gradients(0, gradient).wait()
    assert recorder.counters()["gradient_spill_bytes"] == gradient.num_bytes
    assert recorder.counters()["nvme_write_bytes"] == state + weights + gradient.num_bytes
    store.close()


def test_a_new_tile_is_zero_even_where_another_tile_was(tmp_path: Path, threads_engine: Engine) -> None:
    """Padding never holds bytes of another tile."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards, num_tile_slots=1)
    first, second = shards[0][0].tiles[:2]
    lease = store.new_tile(first)
    fill(lease.buffer, 1)
    store.publish_tile(first, lease)
    lease = store.new_tile(second)
    assert lease.buffer.num_bytes == second.extent_bytes
    assert not content(lease.buffer, second.extent_bytes).any()
    lease.release()
    store.close()


def test_a_lease_released_unpublished_changes_nothing(tmp_path: Path, threads_engine: Engine) -> None:
    """Reading a tile, even scribbling in its slot, leaves what is on disk."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    expected = fill_store(store, shards)
    lease = store.fetch_tile(shards[0][0].tiles[0]).wait()
    fill(lease.buffer, 77)
    lease.release()
    assert_same_bytes(read_store(store, shards), expected)
    store.close()


def test_memory_is_booked_by_owner_and_given_back(tmp_path: Path, threads_engine: Engine) -> None:
    """The ledger knows weights, optimizer state, gradients and tile slots, and is empty after close."""
    ledger, shards = Ledger({}), mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards, ledger=ledger, num_tile_slots=2)
    used = {line.owner: line.used_bytes for line in ledger.report()}
    largest = max(t.extent_bytes for layout, s in shards for t in layout.tiles if t.index not in s.resident_tiles)
    assert used == {
        "weights": sum(layout.shard_weight_bytes for layout, s in shards if s.params is Tier.CPU),
        "optimizer state": sum(t.extent_bytes for layout, s in shards for t in layout.tiles if t.index in s.resident_tiles),
        "gradients": sum(layout.grad_bytes(2) for layout, s in shards if s.grads is Tier.CPU),
        "tile slots": 2 * largest,
    }
    store.close()
    assert ledger.used(Tier.CPU) == 0


def test_swap_files_in_ram_count_as_ram(small_disk: Path, threads_engine: Engine) -> None:
    """On tmpfs the swap files are booked as memory, and a budget that they break is refused. C28."""
    ledger, shards = Ledger({}), on_nvme(odd_layouts())
    store = make_store([small_disk], threads_engine, shards, ledger=ledger)
    swap_bytes = (store.directories[0] / "swap.bin").stat().st_size
    assert {line.owner: line.used_bytes for line in ledger.report()}["swap files in memory"] == swap_bytes
    store.close()
    assert ledger.used(Tier.CPU) == 0
    tight = Ledger({Tier.CPU: swap_bytes - 1})
    with pytest.raises(OverBudget, match="swap files in memory"):
        make_store([small_disk], threads_engine, shards, ledger=tight)
    assert (list(small_disk.iterdir()), tight.used(Tier.CPU)) == ([], 0)


def test_a_budget_too_small_leaves_nothing_behind(tmp_path: Path, threads_engine: Engine) -> None:
    """When the last arena is refused, files, locks and earlier arenas are gone again."""
    shards, probe = mixed(odd_layouts()), Ledger({})
    make_store([tmp_path], threads_engine, shards, ledger=probe).close()
    ledger = Ledger({Tier.CPU: probe.peak(Tier.CPU) - 1})
    with pytest.raises(OverBudget):
        make_store([tmp_path], threads_engine, shards, ledger=ledger)
    assert (list(tmp_path.iterdir()), ledger.used(Tier.CPU)) == ([], 0)


def test_nvme_without_a_directory_is_refused(threads_engine: Engine) -> None:
    """A placement on NVMe needs a place."""
    with pytest.raises(ConfigError, match="no directory is given"):
        make_store([], threads_engine, on_nvme(odd_layouts()))


def test_misuse_is_refused(tmp_path: Path, threads_engine: Engine) -> None:
    """Never published, leased twice, released twice, published after release, too small a buffer, closed."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    tile = shards[0][0].tiles[0]
    with pytest.raises(IllegalTransition, match=r"tile 0 of unit0: EMPTY cannot become READING"):
        store.fetch_tile(tile)
    with pytest.raises(IllegalTransition, match="weights of unit0: read before anything was written"):
        store.fetch_weights(0, page_buffer(shards[0][0].shard_weight_bytes))
    lease = store.new_tile(tile)
    with pytest.raises(IllegalTransition, match="RESIDENT cannot become READING"):
        store.fetch_tile(tile)
    lease.release()
    with pytest.raises(IllegalTransition, match="this lease of it is over"):
        lease.release()
    with pytest.raises(IllegalTransition, match="this lease of it is over"):
        store.publish_tile(tile, lease)
    with pytest.raises(StorageError, match="with a buffer of 4096 bytes"):
        store.publish_weights(0, page_buffer(4096))
    store.close()
    with pytest.raises(IllegalTransition, match="store is closed"):
        store.weights(0)


def test_fetching_twice_waits_gives_the_same_lease(tmp_path: Path, threads_engine: Engine) -> None:
    """A handle may be waited for twice."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    handle = store.fetch_tile(shards[0][0].tiles[0])
    assert handle.wait() is handle.wait()
    store.close()


def test_tiles_stream_through_fewer_slots_from_two_threads(tmp_path: Path, engine: Engine) -> None:
    """Two threads add one to every byte of their own tiles through three slots; none is lost."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards, num_tile_slots=3)
    expected = fill_store(store, shards)
    tiles = [tile for layout, _ in shards for tile in layout.tiles]
    errors: list[BaseException] = []

    def update(mine: Sequence[object]) -> None:
        try:
            for _ in range(3):
                for tile in mine:
                    lease = store.fetch_tile(tile).wait()  # type: ignore[arg-type]
                    lease.buffer.tensor(torch.uint8, lease.buffer.num_bytes).add_(1)
                    store.publish_tile(tile, lease)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=update, args=(tiles[k::2],)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = read_store(store, shards)
    assert_same_bytes(found, {k: v + 3 if not isinstance(k, int) else v for k, v in expected.items()})
    store.close()


def test_two_stores_on_one_directory_do_not_meet(tmp_path: Path, threads_engine: Engine) -> None:
    """The same name twice: a directory each, and each keeps its own bytes."""
    shards = on_nvme(odd_layouts())
    stores = [make_store([tmp_path], threads_engine, shards) for _ in range(2)]
    expected = [fill_store(store, shards, seed) for seed, store in enumerate(stores)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["infinity-test", "infinity-test-2"]
    for store, bytes_ in zip(stores, expected, strict=True):
        assert_same_bytes(read_store(store, shards), bytes_)
    stores[0].close()
    assert_same_bytes(read_store(stores[1], shards), expected[1])
    stores[1].close()
    assert list(tmp_path.iterdir()) == []
