"""Small shards, and engines that make order visible, for the tests of the store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from infinity.aio.engine import UNREGISTERED, Engine, MemoryRange
from infinity.aio.files import DirectFile
from infinity.aio.request import Request
from infinity.handles import Handle
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.states import Tier
from infinity.store.checksums import open_checksums
from infinity.store.layout import ParameterSpec, ShardLayout, shard_layout
from infinity.store.shares import ShardShares
from infinity.store.store import Store, open_store
from infinity.store.stripes import Stripe
from infinity.telemetry.recorder import Recorder

TILE_ELEMENTS = 1024

# The odd-mlp of CASES: byte sizes that are no multiples of 512, a head, and one scalar.
ODD_UNITS = (
    (
        ParameterSpec("first.weight", (51, 100), "bfloat16", True),
        ParameterSpec("first.bias", (51,), "bfloat16", True),
        ParameterSpec("frozen", (33, 7), "bfloat16", False),
    ),
    (ParameterSpec("second.weight", (7, 51), "float32", True), ParameterSpec("second.bias", (7,), "float32", True)),
    (ParameterSpec("head.weight", (1, 256), "float32", True), ParameterSpec("scale", (), "bfloat16", True)),
    (ParameterSpec("table", (5, 5), "float32", False),),
)


def odd_layouts() -> list[ShardLayout]:
    return [shard_layout(index, f"unit{index}", specs, tile_elements=TILE_ELEMENTS) for index, specs in enumerate(ODD_UNITS)]


def on_nvme(layouts: Sequence[ShardLayout]) -> list[tuple[ShardLayout, ShardShares]]:
    """Everything in swap files."""
    return [(layout, ShardShares(Tier.NVME, Tier.NVME, frozenset())) for layout in layouts]


def in_memory(layouts: Sequence[ShardLayout]) -> list[tuple[ShardLayout, ShardShares]]:
    """Everything in arenas."""
    return [(layout, ShardShares(Tier.CPU, Tier.CPU, frozenset(tile.index for tile in layout.tiles))) for layout in layouts]


def mixed(layouts: Sequence[ShardLayout]) -> list[tuple[ShardLayout, ShardShares]]:
    """Every second tile and every second shard's weights in arenas."""
    return [
        (
            layout,
            ShardShares(
                Tier.CPU if layout.index % 2 else Tier.NVME,
                Tier.NVME if layout.index % 2 else Tier.CPU,
                frozenset(tile.index for tile in layout.tiles if tile.index % 2),
            ),
        )
        for layout in layouts
    ]


def make_store(
    directories: Sequence[Path],
    engine: Engine,
    shards: Sequence[tuple[ShardLayout, ShardShares]],
    *,
    ledger: Ledger | None = None,
    recorder: Recorder | None = None,
    run_name: str = "test",
    num_tile_slots: int = 3,
    stripes: Sequence[Stripe] | None = None,
    adopt: Path | None = None,
    checksums: bool = True,
) -> Store:
    return open_store(
        directories=directories, engine=engine, ledger=ledger or Ledger({}), recorder=recorder or Recorder(),
        run_name=run_name, pin=False, num_tile_slots=num_tile_slots, shards=shards, grad_element_bytes=2,
        stripes=stripes, adopt=adopt, checksums=open_checksums() if checksums else None,
    )  # fmt: skip


def page_buffer(num_bytes: int) -> Buffer:
    """A buffer of whole pages, booked nowhere else."""
    return open_arena(num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="test", pin=False).buffer


def fill(buffer: Buffer, seed: int, num_bytes: int | None = None) -> torch.Tensor:
    """Fill the first bytes with noise and return a copy of them."""
    length = buffer.num_bytes if num_bytes is None else num_bytes
    noise = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    buffer.tensor(torch.uint8, length).copy_(noise)
    return noise


def content(buffer: Buffer, num_bytes: int) -> torch.Tensor:
    return buffer.tensor(torch.uint8, num_bytes).clone()


def fill_store(store: Store, shards: Sequence[tuple[ShardLayout, ShardShares]], seed: int = 0) -> dict[object, torch.Tensor]:
    """Publish noise for all weights and tiles and return it by shard index (weights) and tile."""
    expected: dict[object, torch.Tensor] = {}
    for layout, _ in shards:
        source = page_buffer(layout.shard_weight_bytes)
        expected[layout.index] = fill(source, seed + 7 * layout.index)
        store.publish_weights(layout.index, source).wait()
        for tile in layout.tiles:
            lease = store.new_tile(tile)
            expected[tile] = fill(lease.buffer, seed + 1000 * layout.index + tile.index, tile.state_bytes)
            store.publish_tile(tile, lease).wait()
    return expected


def read_store(store: Store, shards: Sequence[tuple[ShardLayout, ShardShares]]) -> dict[object, torch.Tensor]:
    """Fetch all weights and tiles: what `fill_store` returned."""
    found: dict[object, torch.Tensor] = {}
    for layout, _ in shards:
        into = page_buffer(layout.shard_weight_bytes)
        store.fetch_weights(layout.index, into).wait()
        found[layout.index] = content(into, layout.shard_weight_bytes)
        for tile in layout.tiles:
            lease = store.fetch_tile(tile).wait()
            found[tile] = content(lease.buffer, tile.state_bytes)
            lease.release()
    return found


def assert_same_bytes(found: dict[object, torch.Tensor], expected: dict[object, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert different == []


class LazyEngine:
    """Does a request only when somebody waits for it, so that whoever does not wait for a write reads old bytes."""

    name = "lazy"
    facts = UNREGISTERED

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.done: list[Request] = []  # in the order in which they were done

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        pass

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        return [_LazyHandle(self, request) for request in requests]

    def perform(self, request: Request) -> None:
        self._engine.submit([request])[0].wait()
        self.done.append(request)

    def close(self) -> None:
        self._engine.close()


class _LazyHandle:
    def __init__(self, engine: LazyEngine, request: Request) -> None:
        self._engine = engine
        self._request: Request | None = request
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            request, self._request = self._request, None
            if request is not None:
                self._engine.perform(request)

    def done(self) -> bool:
        return self._request is None
