"""The store: one place to ask for a shard's weights, gradients and tiles, wherever they live.

Lengths: extents and buffers are whole pages; the logical bytes (`Tile.state_bytes`, `num_state_elements` times the element)
are what the layout says, and the rest of the last page is zero. The byte counters count whole pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile, open_direct
from infinity.errors import CheckpointMismatch, IllegalTransition, StorageError
from infinity.handles import Handle, wait_until_over
from infinity.memory.arena import Buffer
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, open_pool
from infinity.states import Tier
from infinity.store.cells import BytesCell, CellParts, ShardCells, build_cells, resident_buffers
from infinity.store.checksums import Checking, Checksums, open_checking, require_checksum
from infinity.store.commit import CHECKSUMS, checksum_key, describe_extents, fingerprint, shares_to_json
from infinity.store.directory import RESIDENT_NAME, SWAP_NAME, Removed
from infinity.store.extents import (
    Extent,
    ExtentTable,
    Shards,
    gradient_window,
    plan_extents,
    plan_resident_extents,
    sum_bytes,
    waiting_bytes,
)
from infinity.store.layout import Tile
from infinity.store.resident import ResidentBytes
from infinity.store.stripes import Stripe
from infinity.store.swap_file import create_swap_file
from infinity.store.swap_space import SwapSpace, adopt_swap_space, open_swap_space
from infinity.store.swapped import SwapIo, SwappedBytes
from infinity.store.tiles import TileLease
from infinity.telemetry.recorder import Recorder


class Store:
    """Reads and writes the states of the shards; `open_store` makes one.

    Methods may be called from any thread, `commit_in_place` and `close` from one at a time. Whoever asks for a state that is
    being written waits for that write inside the call, so old bytes are never read; handles carry the errors of the I/O
    itself. After an error of a write that state is lost (every use of it raises the same error); everything else goes on.
    `close` works after any error. The engine, the ledger and the recorder belong to the caller.
    """

    def __init__(
        self, *, shards: Shards, cells: Sequence[ShardCells], table: ExtentTable, grad_element_bytes: int, engine: Engine,
        recorder: Recorder, space: SwapSpace, io: SwapIo, tile_slots: BufferPool | None, checking: Checking | None,
        resources: ExitStack,
    ) -> None:  # fmt: skip
        self.num_tile_slots = tile_slots.num_slots if tile_slots else 0  # 0 when every tile is resident
        self.tile_buffer = tile_slots.buffer if tile_slots else None  # the memory of all slots
        self.directories = space.run_paths
        self.removed_runs: tuple[Removed, ...] = space.removed  # dead runs whose files were removed at the start
        self._shards = tuple(shards)
        self._cells = {one.layout.index: one for one in cells}
        self._table = table
        self._resident_table = plan_resident_extents(shards)
        self._grad_element_bytes = grad_element_bytes
        self._engine = engine
        self._recorder = recorder
        self._space = space
        self._io = io
        self._checking = checking
        self._resources = resources

    def fetch_tile(self, tile: Tile) -> Handle[TileLease]:
        """Lease a tile's bytes: at once when it is resident, else a slot is leased and the extent read into it.

        Blocks for a free slot. Raises IllegalTransition for a tile that is leased already or was never published.
        """
        return self._shard(tile.shard).tiles[tile.index].fetch()

    def publish_tile(self, tile: Tile, lease: TileLease) -> Handle[None]:
        """Make the leased bytes the tile's: written, and the slot free itself afterwards; nothing to do when resident."""
        return self._shard(tile.shard).tiles[tile.index].publish(lease)

    def new_tile(self, tile: Tile) -> TileLease:
        """Lease a buffer of zeros of the tile's `extent_bytes`, to be filled and published. Blocks for a free slot."""
        return self._shard(tile.shard).tiles[tile.index].new()

    def weights(self, shard: int) -> Buffer | None:
        """Return the resident weights; None when they live on NVMe or the shard has none."""
        return _buffer_of(self._shard(shard).weights)

    def fetch_weights(self, shard: int, into: Buffer) -> Handle[None]:
        """Read the shard's `shard_weight_bytes` into the start of `into`, wherever they live."""
        return self._shard(shard).weights.read(into)

    def publish_weights(self, shard: int, source: Buffer) -> Handle[None]:
        """Make the first `shard_weight_bytes` of `source` the shard's weights; it is in use until the handle is done."""
        return self._shard(shard).weights.write(source)

    def gradients(self, shard: int) -> Buffer | None:
        """Return where the resident gradient waits, and before it is finished its sums one behind the other.

        None when they are spilled or the shard has none.
        """
        return _buffer_of(self._shard(shard).gradients)

    def publish_gradients(self, shard: int, source: Buffer) -> Handle[None]:
        """Make the first `grad_bytes` of `source` the shard's gradient; it is in use until the handle is done.

        It takes the place of the shard's first sum.
        """
        cells, element_bytes = self._shard(shard), self._grad_element_bytes
        windows = [gradient_window(tile, element_bytes) for tile in cells.layout.tiles]
        return cells.gradients.write(
            source,
            num_bytes=cells.layout.grad_bytes(element_bytes),
            read_as=[(window.offset, window.num_bytes) for window in windows],
        )

    def fetch_gradients(self, tile: Tile, into: Buffer) -> Handle[None]:
        """Read the pages of the tile's gradients into `into`; `extents.gradient_window` says where in them they begin."""
        window = gradient_window(tile, self._grad_element_bytes)
        return self._shard(tile.shard).gradients.read(into, offset=window.offset, num_bytes=window.num_bytes)

    def publish_sum(self, shard: int, number: int, source: Buffer) -> Handle[None]:
        """Make the first bytes of `source` one of the shard's `num_sums` sums; it is in use until the handle is done."""
        cells, num_bytes = self._shard(shard), self._sum_bytes(shard)
        return cells.gradients.write(source, offset=number * num_bytes, num_bytes=num_bytes)

    def fetch_sum(self, shard: int, number: int, into: Buffer) -> Handle[None]:
        """Read one of the shard's sums into the start of `into`."""
        cells, num_bytes = self._shard(shard), self._sum_bytes(shard)
        return cells.gradients.read(into, offset=number * num_bytes, num_bytes=num_bytes)

    def _sum_bytes(self, shard: int) -> int:
        layout, shares = self._shards[shard]
        return sum_bytes(layout, shares.num_sum_elements)

    def sync(self) -> None:
        """Wait for every write and make it durable. Raises the first error of a write."""
        for cell in self._swapped():
            cell.settle()
        self._space.sync()

    def describe(self) -> dict[str, object]:
        """Return where everything is, as JSON-able values: what a checkpoint in place records."""
        return {
            "fingerprint": fingerprint(self._shards, self._table, self._grad_element_bytes),
            "directories": [str(path) for path in self.directories],
            "file_bytes": list(self._table.file_bytes),
            "stripes": [asdict(stripe) for stripe in self._table.stripes],
            "shares": shares_to_json([shares for _, shares in self._shards]),
            "shards": describe_extents(self._table, self._resident_table, self._shards),
        }

    def commit_in_place(self, manifest: Mapping[str, object]) -> None:
        """Make the swap files a checkpoint: drain, write what lives in RAM to `resident.bin`, fsync, commit `manifest`.

        It stands until the next write to a swap file, which takes it back (see store/commit.py). An earlier one is gone as
        soon as this is called. Raises SwapSpaceError when there is no room for `resident.bin`, StorageError, and
        IllegalTransition while a tile is leased or was never published; then there is no checkpoint and the run may go on.
        """
        path = self._space.resident_path()
        self._require_stored()
        self.sync()
        self._space.consume()
        num_bytes = self._resident_table.file_bytes[0]
        if num_bytes:
            self._write_resident(path, num_bytes)
        description = {**self.describe(), CHECKSUMS: self._committed_checksums()}
        self._space.commit(description=description, resident_bytes=num_bytes, manifest=manifest)

    def close(self, *, keep: bool = False) -> None:
        """End all I/O, give the memory back and remove the run directories. Closing twice is fine, also after an error.

        With `keep` a checkpoint in place that still stands is left where it is. One that was adopted and not yet written
        over is left in any case.
        """
        self._io.close()
        for cell in self._swapped():
            cell.finish()
        for cells in self._cells.values():
            for tile in cells.swapped_tiles():
                tile.abandon()
        if keep:
            self._space.keep()
        self._resources.close()

    def _shard(self, index: int) -> ShardCells:
        self._io.require_open()
        return self._cells[index]

    def _swapped(self) -> Iterator[SwappedBytes]:
        return (cell for cells in self._cells.values() for cell in cells.swapped())

    def _require_stored(self) -> None:
        for cells in self._cells.values():
            for tile in cells.swapped_tiles():
                tile.require_published()
            if isinstance(cells.weights, SwappedBytes) and not cells.weights.written:
                raise IllegalTransition(
                    f"The weights of {cells.layout.name} were never published; there is nothing to commit."
                )

    def _committed_checksums(self) -> dict[str, int]:
        """Return the checksums of everything that a checkpoint in place holds, as far as they are known."""
        if self._checking is None:
            return {}
        found = {checksum_key(SWAP_NAME, cell.extent): cell.checksum for cell in self._swapped()}
        for _, extent, buffer in self._resident_buffers():
            found[checksum_key(RESIDENT_NAME, extent)] = self._checking.checksums.of(buffer.address, extent.num_bytes)
        return {key: value for key, value in found.items() if value is not None}

    def _resident_buffers(self) -> Iterator[tuple[str, Extent, Buffer]]:
        return resident_buffers(self._resident_table, tuple(self._cells.values()))

    def _write_resident(self, path: Path, num_bytes: int) -> None:
        file = create_swap_file(path, num_bytes)
        try:
            io = SwapIo(self._engine, [file], self._recorder)
            wait_until_over([io.write(extent, buffer) for _, extent, buffer in self._resident_buffers()])
            file.sync()
        except StorageError:
            path.unlink(missing_ok=True)
            raise
        finally:
            _let_go(file, self._engine)


def open_store(
    *,
    directories: Sequence[Path],
    engine: Engine,
    ledger: Ledger,
    recorder: Recorder,
    run_name: str,
    pin: bool,
    num_tile_slots: int,
    shards: Shards,
    grad_element_bytes: int,
    stripes: Sequence[Stripe] | None = None,
    adopt: Path | None = None,
    checksums: Checksums | None = None,
) -> Store:
    """Reserve all memory and disk that the shards need, and return the store. On any error nothing is left behind.

    Without `adopt` each of `directories` gets a run directory with a swap file (none is touched when nothing is on NVMe),
    `stripes` say how the bytes are shared out among them (equally unless given), and all states start out empty. With it,
    the checkpoint in place in that run directory is taken over: `directories`, `run_name` and `stripes` are not used, every
    state is as committed, and `shards` must be those of the commit (`commit.read_commit` returns its shares and manifest).

    With `checksums` everything that is read from swap files is compared with what was written, beside, on two threads of the
    store; without, nothing is and there are no threads.

    Raises StorageError for an unfit directory, SwapSpaceError, OverBudget, PlatformError where the system has no thread
    left, ConfigError for a bad run name or no directory, and with `adopt` CheckpointIncomplete, CheckpointMismatch and
    SwapCorruptionError.
    """
    with ExitStack() as resources:
        committed_checksums: Mapping[str, int] = {}
        if adopt is None:
            equal = [Stripe(1.0)] * max(1, len(directories))
            table = plan_extents(shards, grad_element_bytes=grad_element_bytes, stripes=stripes or equal)
            space = open_swap_space(directories, run_name, table.file_bytes, ledger=ledger, resources=resources)
        else:
            space, commit = adopt_swap_space(adopt, ledger=ledger, resources=resources)
            table = plan_extents(shards, grad_element_bytes=grad_element_bytes, stripes=commit.stripes)
            if fingerprint(shards, table, grad_element_bytes) != commit.fingerprint:
                raise CheckpointMismatch(
                    f"{adopt} holds a checkpoint of another model, precision, tile size or placement.",
                    remedy="Resume with the settings that it was written with.",
                )
            committed_checksums = commit.checksums
        io = SwapIo(engine, space.files, recorder)
        engine.register(files=space.files)
        resources.callback(engine.unregister, files=space.files)
        pool = _open_slots(table, num_tile_slots, ledger=ledger, resources=resources)
        checking = open_checking(checksums, resources) if checksums is not None else None  # ended before the slots go
        parts = CellParts(io, space, pool, ledger, pin, checking, committed_checksums, resources)
        cells = [
            build_cells(layout, extents, waiting_bytes(layout, shares, grad_element_bytes), parts)
            for (layout, shares), extents in zip(shards, table.shards, strict=True)
        ]
        if adopt is not None:
            _read_resident(shards, cells, parts, engine, recorder)
        return Store(
            shards=shards, cells=cells, table=table, grad_element_bytes=grad_element_bytes, engine=engine, recorder=recorder,
            space=space, io=io, tile_slots=pool, checking=checking, resources=resources.pop_all(),
        )  # fmt: skip


def _open_slots(table: ExtentTable, num_slots: int, *, ledger: Ledger, resources: ExitStack) -> BufferPool | None:
    largest = max((extent.num_bytes for shard in table.shards for extent in shard.tiles if extent is not None), default=0)
    if not largest:
        return None
    pool = open_pool(slot_bytes=largest, num_slots=num_slots, ledger=ledger, tier=Tier.CPU, owner="tile slots", pin=False)
    resources.callback(_close_pool, pool)
    return pool


def _close_pool(pool: BufferPool) -> None:
    with contextlib.suppress(StorageError):  # of a write whose handle somebody has; the memory is returned all the same
        pool.close()


def _read_resident(
    shards: Shards, cells: Sequence[ShardCells], parts: CellParts, engine: Engine, recorder: Recorder
) -> None:
    table = plan_resident_extents(shards)
    if not any(table.file_bytes):
        return
    path = parts.space.resident_path()
    file = open_direct(path, create=False)
    try:
        io = SwapIo(engine, [file], recorder)
        wait_until_over([io.read(extent, buffer) for _, extent, buffer in resident_buffers(table, cells)])
    finally:
        _let_go(file, engine)
    for name, extent, buffer in resident_buffers(table, cells):
        expected = parts.committed_checksums.get(checksum_key(RESIDENT_NAME, extent))
        if parts.checking is not None and expected is not None:
            checksums, num_bytes, offset = parts.checking.checksums, extent.num_bytes, extent.offset
            require_checksum(checksums, expected, buffer.address, num_bytes, path=path, offset=offset, name=name)


def _let_go(file: DirectFile, engine: Engine) -> None:
    """Close a file that was used once; what the engine has opened of it would keep its space after it is removed."""
    engine.unregister(files=[file])
    file.close()


def _buffer_of(cell: BytesCell) -> Buffer | None:
    return cell.buffer if isinstance(cell, ResidentBytes) else None
