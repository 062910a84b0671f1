"""A store that lives in memory, whose I/O takes time, may fail, and shows in which order it happened."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from infinity.errors import StorageError
from infinity.handles import Handle, Promise, Ready
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.pool import BufferPool, open_pool
from infinity.optim.hyper import GroupHyper, UpdateStep
from infinity.optim.reference import adam_update_, join_master, split_master
from infinity.states import Tier
from infinity.store.extents import gradient_window
from infinity.store.layout import ELEMENT_BYTES, ParameterSpec, ShardLayout, Tile, shard_layout, tile_segments
from infinity.store.shares import ShardShares
from infinity.store.tiles import TileLease

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int16": torch.int16}
Key = tuple[str, int, int]  # ("tile" | "weights" | "gradients", shard, tile or -1)


def small_buffer(num_bytes: int, owner: str = "test") -> Buffer:
    return open_arena(num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner=owner, pin=False).buffer


@dataclass
class FakeStore:
    """The seam of the store. I/O is done by one thread, one operation after the other, `delay_seconds` each.

    Bytes move when an operation ends, so a buffer that is used again too early shows up as wrong bytes. Asking for more
    tiles at once than there are slots is an error instead of a deadlock.
    """

    shards: list[tuple[ShardLayout, ShardShares]]
    num_tile_slots: int
    grad_element_bytes: int
    delay_seconds: float = 0.0
    fails: Callable[[str, Key], bool] = lambda operation, key: False
    events: list[tuple[str, Key]] = field(default_factory=list)
    most_slots: int = 0
    mixed_directions: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._slots_out = 0
        self._in_flight = {"read": 0, "write": 0}
        self.bytes: dict[Key, Buffer] = {}
        self._nvme: set[Key] = set()
        for layout, shares in self.shards:
            self._add(("weights", layout.index, -1), layout.shard_weight_bytes, nvme=shares.params is Tier.NVME)
            if layout.tiles:
                grad_bytes = layout.grad_bytes(self.grad_element_bytes)
                self._add(("gradients", layout.index, -1), grad_bytes, nvme=shares.grads is Tier.NVME)
            for tile in layout.tiles:
                nvme = tile.index not in shares.resident_tiles
                self._add(("tile", layout.index, tile.index), tile.extent_bytes, nvme=nvme)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def fetch_tile(self, tile: Tile) -> Handle[TileLease]:
        key = ("tile", tile.shard, tile.index)
        if key not in self._nvme:
            return Ready(TileLease(self.bytes[key], lambda lease: None))
        with self._lock:
            self._slots_out += 1
            self.most_slots = max(self.most_slots, self._slots_out)
            if self._slots_out > self.num_tile_slots:
                raise StorageError(f"{self._slots_out} slots asked for, there are {self.num_tile_slots}")
        buffer = small_buffer(tile.extent_bytes)
        lease = TileLease(buffer, lambda lease: self._slot_back())
        return self._transfer("read", key, buffer, self.bytes[key], lease)

    def publish_tile(self, tile: Tile, lease: TileLease) -> Handle[None]:
        key = ("tile", tile.shard, tile.index)
        if key not in self._nvme:
            return Ready(None)
        return self._transfer("write", key, self.bytes[key], lease.buffer, None, then=self._slot_back)

    def weights(self, shard: int) -> Buffer | None:
        return self._resident(("weights", shard, -1))

    def fetch_weights(self, shard: int, into: Buffer) -> Handle[None]:
        key = ("weights", shard, -1)
        return self._transfer("read", key, into, self.bytes[key], None)

    def publish_weights(self, shard: int, source: Buffer) -> Handle[None]:
        key = ("weights", shard, -1)
        return self._transfer("write", key, self.bytes[key], source, None)

    def gradients(self, shard: int) -> Buffer | None:
        return self._resident(("gradients", shard, -1))

    def fetch_gradients(self, tile: Tile, into: Buffer) -> Handle[None]:
        window = gradient_window(tile, self.grad_element_bytes)
        key = ("gradients", tile.shard, -1)
        source = self.bytes[key].part(window.offset, window.num_bytes)
        return self._transfer("read", key, into, source, None)

    def _add(self, key: Key, num_bytes: int, *, nvme: bool) -> None:
        self.bytes[key] = small_buffer(num_bytes)
        if nvme:
            self._nvme.add(key)

    def _resident(self, key: Key) -> Buffer | None:
        return None if key in self._nvme else self.bytes.get(key)

    def _slot_back(self) -> None:
        with self._lock:
            self._slots_out -= 1

    def _transfer(self, operation: str, key: Key, to: Buffer, source: Buffer, result, then=lambda: None):  # type: ignore[no-untyped-def]
        promise: Promise[object] = Promise()
        with self._lock:
            self.events.append((f"{operation} begins", key))
            self._in_flight[operation] += 1
            self.mixed_directions |= all(self._in_flight.values())

        def carry_out() -> None:
            time.sleep(self.delay_seconds)
            failed = self.fails(operation, key)
            if not failed:
                ctypes.memmove(to.address, source.address, min(to.num_bytes, source.num_bytes))
            with self._lock:
                self.events.append((f"{operation} ends", key))
                self._in_flight[operation] -= 1
            then()
            if failed:
                if operation == "read" and key[0] == "tile":
                    self._slot_back()
                promise.fail(StorageError(f"{operation} of {key} failed"))
            else:
                promise.resolve(result)

        self._work.put(carry_out)
        return promise

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


# Sections of three kinds, tiles that cut segments, a tile of one short section, gradient pieces that start inside a page.
UNIT_SPECS = (
    (
        ParameterSpec("frozen", (33, 7), "bfloat16", False),
        ParameterSpec("weight", (61, 101), "bfloat16", True),
        ParameterSpec("bias", (101,), "bfloat16", True, group=1),
        ParameterSpec("norm", (77,), "float32", True, group=1),
    ),
    (ParameterSpec("weight", (40, 90), "float32", True), ParameterSpec("scale", (), "float32", True, group=1)),
    (ParameterSpec("table", (70, 64), "bfloat16", True),),
)
TILE_ELEMENTS = 1024 + 64


def make_layouts(tile_elements: int = TILE_ELEMENTS) -> list[ShardLayout]:
    return [shard_layout(i, f"unit{i}", specs, tile_elements=tile_elements) for i, specs in enumerate(UNIT_SPECS)]


def shares(layout: ShardLayout, tier: Tier) -> ShardShares:
    """Everything of the shard in RAM or everything on NVMe."""
    resident = frozenset(tile.index for tile in layout.tiles) if tier is Tier.CPU else frozenset[int]()
    return ShardShares(tier, tier, resident)


@dataclass
class Parameter:
    """What one parameter should be: plain tensors, updated by the reference."""

    master: torch.Tensor  # fp32 [numel]
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor


Model = dict[tuple[int, str], Parameter]


def make_model(layouts: list[ShardLayout], grad_dtype: torch.dtype, seed: int = 0) -> Model:
    """Random state for every trainable parameter."""
    generator = torch.Generator().manual_seed(seed)

    def random(numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator)

    return {
        (layout.index, spec.name): Parameter(
            random(spec.numel),
            random(spec.numel) * 0.1,
            random(spec.numel).square() * 0.01,
            random(spec.numel).to(grad_dtype),
        )
        for layout in layouts
        for spec in layout.specs
        if spec.trainable
    }


def write_model(store: FakeStore, model: Model) -> None:
    """Put the model straight into the fake's memory."""
    for (layout, key, parameter), planes in _planes(store, model):
        expected = model[layout.index, key]
        piece = slice(parameter.parameter_offset, parameter.parameter_offset + parameter.length)
        if "low" in planes:
            high, low = split_master(expected.master[piece])
            planes["weights"].copy_(high)
            planes["low"].copy_(low)
        else:
            planes["weights"].copy_(expected.master[piece])
        planes["exp_avg"].copy_(expected.exp_avg[piece])
        planes["exp_avg_sq"].copy_(expected.exp_avg_sq[piece])
        planes["grad"].copy_(expected.grad[piece])


def read_model(store: FakeStore, model: Model) -> Model:
    """Return what the fake's memory holds now, with the names and shapes of `model`."""
    found = {
        key: Parameter(*(torch.full_like(part, 7) for part in (one.master, one.exp_avg, one.exp_avg_sq, one.grad)))
        for key, one in model.items()
    }
    for (layout, key, parameter), planes in _planes(store, model):
        target = found[layout.index, key]
        piece = slice(parameter.parameter_offset, parameter.parameter_offset + parameter.length)
        weights = planes["weights"]
        target.master[piece] = join_master(weights, planes["low"]) if "low" in planes else weights
        target.exp_avg[piece] = planes["exp_avg"]
        target.exp_avg_sq[piece] = planes["exp_avg_sq"]
        target.grad[piece] = planes["grad"]
    return found


def differing(one: Model, other: Model) -> list[str]:
    """Return which arrays of which parameters differ in a bit."""
    return [
        f"{key}.{name}"
        for key in one
        for name in ("master", "exp_avg", "exp_avg_sq")
        if not torch.equal(getattr(one[key], name).view(torch.int32), getattr(other[key], name).view(torch.int32))
    ]


GROUPS = (
    GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, decoupled=True),
    GroupHyper(3e-3, 0.8, 0.95, 1e-6, 0.0, decoupled=True),
)


def make_step(model: Model, counts: Mapping[tuple[int, str], int], grad_dtype: str, coefficient: float = 0.5) -> UpdateStep:
    """A step that touches the parameters that `counts` names."""
    steps: dict[int, dict[str, int]] = {}
    for (shard, name), count in counts.items():
        steps.setdefault(shard, {})[name] = count
    return UpdateStep(GROUPS, steps, coefficient, grad_dtype)


def expect_step(layouts: list[ShardLayout], model: Model, step: UpdateStep) -> None:
    """Update the model in place by the reference."""
    for (shard, name), parameter in model.items():
        count = step.steps.get(shard, {}).get(name)
        if count is None:
            continue
        spec = layouts[shard].spec(name)
        hyper = step.groups[spec.group].at(count)
        adam_update_(parameter.master, parameter.exp_avg, parameter.exp_avg_sq, parameter.grad, hyper, step.coefficient)


def weight_slots(layouts: list[ShardLayout], num_slots: int) -> BufferPool:
    slot_bytes = max(layout.shard_weight_bytes for layout in layouts)
    return open_pool(
        slot_bytes=slot_bytes, num_slots=num_slots, ledger=Ledger({}), tier=Tier.CPU, owner="weights", pin=False
    )


def _planes(store: FakeStore, model: Model):  # type: ignore[no-untyped-def]
    """Yield each piece of each parameter with views of its arrays."""
    grad_dtype = next(iter(model.values())).grad.dtype
    for layout, _ in store.shards:
        for tile in layout.tiles:
            section = layout.sections[tile.section]
            state = store.bytes["tile", layout.index, tile.index]
            for segment in tile_segments(section, tile):
                first = tile.offset + segment.offset
                planes = {
                    "weights": store.bytes["weights", layout.index, -1].tensor(
                        DTYPES[section.dtype], segment.length, section.shard_byte_offset + first * section.element_bytes
                    ),
                    "grad": store.bytes["gradients", layout.index, -1].tensor(
                        grad_dtype, segment.length, (tile.state_offset + segment.offset) * grad_dtype.itemsize
                    ),
                }
                for plane in tile.planes:
                    offset = tile.plane_offset(plane.name) + segment.offset * ELEMENT_BYTES[plane.dtype]
                    name = "low" if plane.name == "master_low" else plane.name
                    planes[name] = state.tensor(DTYPES[plane.dtype], segment.length, offset)
                yield (layout, segment.parameter, segment), planes
