"""A bit that changes on its way to the disk, on the disk or on its way back is an error that names file, offset and tile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_cases import (
    assert_same_bytes,
    content,
    fill,
    fill_store,
    make_store,
    mixed,
    odd_layouts,
    on_nvme,
    page_buffer,
    read_store,
)

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op
from infinity.errors import SwapCorruptionError
from infinity.memory.arena import Buffer
from infinity.store.commit import find_resident, read_commit
from infinity.store.extents import gradient_window, plan_extents, sum_bytes
from infinity.store.layout import ShardLayout, Tile
from infinity.store.store import Store

FOUND = r"CRC32C [0-9a-f]{8} expected, [0-9a-f]{8} found\. Look for errors of the disk"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def place_of(store: Store, shard: int, tile: int | None = None) -> tuple[Path, int, int]:
    """Return file, offset and length of a shard's weights, or of a tile of it; of what is resident once committed."""
    described = store.describe()["shards"][shard]  # type: ignore[index]
    where = described["weights"] if tile is None else described["tiles"][tile]
    resident = find_resident(store.directories)
    path = store.directories[where["directory"]] / where["file"] if "directory" in where else resident
    assert path is not None
    return path, where["offset"], where["length"]


def bytes_of(tile: Tile) -> dict[str, int]:
    """Return first and last byte of every plane and of the padding."""
    places = {}
    for plane in tile.planes:
        begin = tile.plane_offset(plane.name)
        places[f"first of {plane.name}"] = begin
        places[f"last of {plane.name}"] = begin + tile.num_elements * plane.element_bytes - 1
    if tile.extent_bytes > tile.state_bytes:
        places["first of padding"] = tile.state_bytes
        places["last of padding"] = tile.extent_bytes - 1
    return places


@pytest.mark.parametrize("shard", [0, 1], ids=["bf16", "fp32"])
def test_a_flipped_bit_of_a_tile_is_found_wherever_it_is(tmp_path: Path, engine: Engine, shard: int) -> None:
    """First and last byte of every plane and of the padding; put right again, the tile is read as it was."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards, num_tile_slots=1)
    expected = fill_store(store, shards)
    tile = shards[shard][0].tiles[-1]
    path, offset, length = place_of(store, shard, tile.index)
    for number, byte in enumerate(bytes_of(tile).values()):
        flip(path, offset + byte, number % 8)
        words = (
            f"{path}: tile {tile.index} of unit{shard}, {length} bytes at offset {offset}, is not what was written: {FOUND}"
        )
        handle = store.fetch_tile(tile)
        for _ in range(2):
            with pytest.raises(SwapCorruptionError, match=words) as caught:
                handle.wait()
        assert caught.value.exit_code == 12
        flip(path, offset + byte, number % 8)
    assert_same_bytes(read_store(store, shards), expected)  # the only slot came back each time
    store.close()


@pytest.mark.parametrize("byte", [0, -1])
def test_a_flipped_bit_of_weights_is_found(tmp_path: Path, engine: Engine, byte: int) -> None:
    """Trainable and frozen ones alike."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    for layout, _ in shards:
        path, offset, length = place_of(store, layout.index)
        flip(path, offset + byte % length, 7)
        with pytest.raises(SwapCorruptionError, match=f"weights of {layout.name}, {length} bytes at offset {offset}"):
            store.fetch_weights(layout.index, page_buffer(length)).wait()
    store.close()


def test_a_flipped_bit_of_a_spilled_gradient_is_found_by_the_tile_that_reads_it(tmp_path: Path, engine: Engine) -> None:
    """Tiles share the page where one ends and the next begins; those that do not read the bit are not disturbed."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    layout = shards[0][0]
    source = page_buffer(layout.grad_bytes(2))
    fill(source, 3)
    store.publish_gradients(0, source).wait()
    extent = plan_extents(shards, grad_element_bytes=2).shards[0].gradients
    assert extent is not None
    begin = extent.offset
    for byte in (0, 2047, 2048, 4096, layout.num_state_elements * 2 - 1):
        flip(store.directories[0] / "swap.bin", begin + byte)
        for tile in layout.tiles:
            window = gradient_window(tile, 2)
            into = page_buffer(window.num_bytes)
            handle = store.fetch_gradients(tile, into)
            if window.offset <= byte < window.offset + window.num_bytes:
                with pytest.raises(SwapCorruptionError, match=f"gradients of unit0, {window.num_bytes} bytes"):
                    handle.wait()
            else:
                handle.wait()
        flip(store.directories[0] / "swap.bin", begin + byte)
    store.close()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_bit_flipped_on_its_way_is_found(tmp_path: Path, engine: Engine, op: Op) -> None:
    """A disk that writes or reads something else and says that all went well: tiles, weights, gradients and sums."""
    wrong = [False]
    shards = [(layout, replace(shares, num_sums=2)) for layout, shares in on_nvme(odd_layouts()) if layout.tiles]
    fault = Fault(FaultKind.CORRUPT, lambda request: wrong[0] and request.op is op)
    store = make_store([tmp_path], FaultyEngine(engine, [fault]), shards)
    fill_store(store, shards)
    layout = shards[0][0]
    tiles, (weights, gradient, one_sum) = layout.tiles, _buffers(layout)
    lease = store.fetch_tile(tiles[0]).wait()
    wrong[0] = True
    store.publish_tile(tiles[0], lease).wait()
    store.publish_weights(0, weights).wait()
    store.publish_sum(0, 1, one_sum).wait()
    store.publish_gradients(0, gradient).wait()
    for name, read in (
        ("tile 0 of unit0", lambda: store.fetch_tile(tiles[0])),
        ("weights of unit0", lambda: store.fetch_weights(0, weights)),
        (f"gradients of unit0, {sum_bytes(layout)} bytes", lambda: store.fetch_sum(0, 1, one_sum)),
    ):
        with pytest.raises(SwapCorruptionError, match=name):
            read().wait()
    middle = layout.grad_bytes(2) // 2
    for tile in tiles:
        window = gradient_window(tile, 2)
        handle = store.fetch_gradients(tile, one_sum)
        if op is Op.READ or window.offset <= middle < window.offset + window.num_bytes:
            with pytest.raises(SwapCorruptionError, match="gradients of unit0"):
                handle.wait()
        else:
            handle.wait()
    store.close()


def _buffers(layout: ShardLayout) -> list[Buffer]:
    return [page_buffer(num_bytes) for num_bytes in (layout.shard_weight_bytes, layout.grad_bytes(2), sum_bytes(layout))]


def test_without_checksums_nothing_is_noticed(tmp_path: Path, threads_engine: Engine) -> None:
    """Switched off, a read gives what the disk gives."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards, checksums=False)
    expected = fill_store(store, shards)
    tile = shards[0][0].tiles[0]
    path, offset, _ = place_of(store, 0, 0)
    flip(path, offset)
    lease = store.fetch_tile(tile).wait()
    assert (content(lease.buffer, tile.state_bytes) != expected[tile]).sum() == 1
    lease.release()
    store.commit_in_place({})
    assert read_commit(store.directories[0]).checksums == {}
    store.close()


@pytest.mark.parametrize("num_directories", [1, 2])
def test_a_checkpoint_in_place_is_checked_when_it_is_taken_over(
    tmp_path: Path, threads_engine: Engine, num_directories: int
) -> None:
    """A bit that changed while nobody ran is found: in the swap file at first use, in resident.bin at once."""
    directories = [tmp_path / f"disk{number}" for number in range(num_directories)]
    shards = mixed(odd_layouts())
    store = make_store(directories, threads_engine, shards)
    expected = fill_store(store, shards)
    store.commit_in_place({})
    runs = store.directories
    swapped = [place_of(store, 0), place_of(store, 0, 0)]
    resident = [place_of(store, 1), place_of(store, 0, 1)]
    store.close(keep=True)
    for path, offset, length in swapped:
        flip(path, offset + length - 1)
        adopted = make_store([], threads_engine, shards, adopt=runs[0])
        with pytest.raises(SwapCorruptionError, match=f"{path}: .* of unit0, {length} bytes at offset {offset}"):
            read_store(adopted, shards)
        adopted.close()
        flip(path, offset + length - 1)
    for path, offset, length in resident:
        flip(path, offset)
        with pytest.raises(SwapCorruptionError, match=f"{path}: .* of unit., {length} bytes at offset {offset}"):
            make_store([], threads_engine, shards, adopt=runs[0])
        flip(path, offset)
    adopted = make_store([], threads_engine, shards, adopt=runs[0])
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.commit_in_place({})  # nothing was written meanwhile: what was known is recorded again
    assert len(read_commit(runs[0]).checksums) == sum(1 + len(layout.tiles) for layout, _ in shards)
    adopted.close(keep=True)


@pytest.mark.parametrize("first", [False, True])
def test_checksums_may_be_switched_between_two_runs(tmp_path: Path, threads_engine: Engine, first: bool) -> None:
    """What was committed without them is taken over unchecked, then checked from its next write on; and the reverse."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards, checksums=first)
    expected = fill_store(store, shards)
    store.commit_in_place({})
    run = store.directories[0]
    store.close(keep=True)
    adopted = make_store([], threads_engine, shards, adopt=run, checksums=not first)
    assert_same_bytes(read_store(adopted, shards), expected)
    expected = fill_store(adopted, shards, 5)
    adopted.commit_in_place({})
    assert bool(read_commit(run).checksums) is not first
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.close()


def test_a_buffer_may_be_filled_anew_when_its_read_is_done(tmp_path: Path, engine: Engine) -> None:
    """A load made ahead in vain: its buffer is used again without anybody having waited for it."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    expected = fill_store(store, shards)
    into = page_buffer(max(layout.shard_weight_bytes for layout, _ in shards))
    first = store.fetch_weights(0, into)
    while not first.done():
        pass
    store.fetch_weights(1, into).wait()
    first.wait()
    assert torch.equal(content(into, shards[1][0].shard_weight_bytes), expected[1])
    store.close()
